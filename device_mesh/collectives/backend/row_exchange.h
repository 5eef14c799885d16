// A reduce-scatter whose rows are exchanged with one peer after another and then added in
// the order of the ranks: the sum is the same whatever the timing, and on Gloo it is two
// to eight times faster than the backend's own reduce-scatter.
//
//   RowExchange exchange(group, rows, at::kBFloat16, {.what = "reduce-scatter of 'blocks.0'"});
//   ...
//   at::Tensor sum = exchange.wait();   // this rank's row, summed: [elements] of kFloat
//
// The memory of a row that was sent takes the row that is received next, so one spare row
// is all that it needs beyond the rows themselves. CPU only. Collective over the group.
#pragma once

#include "device_mesh/collectives/backend/pending.h"
#include "device_mesh/collectives/group.h"
#include "device_mesh/collectives/operations.h"
#include "device_mesh/collectives/watched_rank.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace fsdp::internal {

struct RowExchangeOptions {
  std::string what;  // names the operation in errors
  // The bytes at the beginning of each row that are sent; none: all of it.
  std::vector<int64_t> lengths = {};
  int tag = 0;  // of the messages (c10d_collectives.h)
  // Runs before anything is waited for; what it throws is what wait() throws, and no
  // further round begins.
  std::function<void()> agree = {};
  // When the rounds behind the first go on: in the wait, or while the caller does
  // something else.
  enum class Rounds { kInWait, kInBackground } rounds = Rounds::kInWait;
  // What agree() waits for, and so does whoever waits for a background that is there.
  std::shared_ptr<AwaitedOperation> awaited = {};
};

class RowExchange {
 public:
  // rows: uint8, [group size, row bytes], each row contiguous; row r goes to rank r.
  // Overwritten.
  RowExchange(const Group& group, const at::Tensor& rows, Summands summands,
              RowExchangeOptions options);
  // Takes part in the rounds that are left: the other ranks count on it.
  ~RowExchange();
  RowExchange(const RowExchange&) = delete;
  RowExchange& operator=(const RowExchange&) = delete;

  int64_t staging_bytes() const;
  // REQUIRES: called once. This rank's row summed over the ranks, [elements] of
  // sum_dtype(), as sum_in_order() adds. Throws DistBackendError when a round
  // failed.
  at::Tensor wait();

 private:
  int64_t peer(int64_t distance) const;
  // What is sent of memory of a row that goes to `rank`.
  at::Tensor beginning_for(int64_t rank, const at::Tensor& row) const;
  void start_round();
  void run_rounds() noexcept;  // those that are left; keeps what goes wrong
  void finish();

  Group group_;
  Summands summands_;
  RowExchangeOptions options_;
  int64_t rank_, size_;
  std::vector<at::Tensor> rows_;      // by receiver
  std::vector<at::Tensor> received_;  // by sender, in memory of rows that were sent
  at::Tensor spare_;
  int64_t round_ = 1;  // the row for rank + round is sent, that of rank - round received
  Pending receiving_, sending_;
  std::exception_ptr failure_;
  bool finished_ = false;
  std::thread background_;
};

// The rows of the other ranks of a group, each a message of its own from its rank: an
// all-gather for transports where messages are faster than collectives
// (better_by_messages). CPU only. Collective over the group.
//
//   RowGather gather(group, row, lengths, tag_of(stamp));
//   gather.wait("all-gather of unit 'blocks.0'");
//   gather.row(2);   // uint8 [bytes], what rank 2 sent
class RowGather {
 public:
  // row: uint8, contiguous, of the same size on every rank; must not be written before
  // the wait. lengths: as AllGatherOptions has them. Returns at once.
  RowGather(const Group& group, const at::Tensor& row, const std::vector<int64_t>& lengths,
            int tag);

  int64_t staging_bytes() const { return rows_->received.numel(); }
  // Throws DistBackendError, naming `what`, where a message failed; then nobody waits for
  // the others any more.
  void wait(const std::string& what);
  // The ranks do not agree on what is sent: the messages and their memory stay with the
  // group.
  void abandon();
  // REQUIRES: waited for. Of any rank, this one included.
  const char* row(int64_t rank) const;
  // Keeps every row's memory.
  std::shared_ptr<const void> memory() const { return rows_; }

 private:
  struct Rows {
    at::Tensor own, received;      // the others' behind one another, in the order of the ranks
    std::vector<int64_t> offsets;  // of each rank's in `received`, and where they end
  };
  static std::shared_ptr<const Rows> rows_of(const at::Tensor& row,
                                             const std::vector<int64_t>& lengths, int64_t rank,
                                             int64_t size);
  // What this rank sends, and what another one does.
  at::Tensor sent(const std::vector<int64_t>& lengths) const;
  at::Tensor place_of(int64_t rank) const;

  Group group_;
  int64_t rank_, size_;
  std::shared_ptr<const Rows> rows_;
  std::vector<Pending> messages_;
};

}  // namespace fsdp::internal
