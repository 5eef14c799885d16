// The rows of the other ranks of a group, each a message of its own from its rank: an
// all-gather for transports where messages are faster than collectives
// (better_by_messages). CPU only. Collective over the group.
//
//   RowGather gather(group, row, tag_of(stamp));
//   gather.wait("all-gather of unit 'blocks.0'");
//   gather.row(2);   // uint8 [bytes], what rank 2 sent
#pragma once

#include "device_mesh/collectives/backend/pending.h"
#include "device_mesh/collectives/group.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::internal {

class RowGather {
 public:
  // row: uint8, contiguous, of the same size on every rank; must not be written before
  // the wait. lengths: as GatherOptions has them. Returns at once.
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
