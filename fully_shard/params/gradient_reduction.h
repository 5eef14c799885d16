// Reduce-scatter and, for hybrid sharding, all-reduce of one group's gradients (PyTorch's
// foreach_reduce), stage by stage:
//
//   packed    full gradients in rows, one per rank
//   sent      the transport adds the rows up (16-bit types in float)
//   shared    hybrid sharding: this rank's row is added up over the replicas as well; with
//             HFSDP each of them gets the sum of its piece alone
//   received  this rank's row, summed
//
// Then its ReducedRow is divided, brought to where the shards are, and published: cast to
// the parameters' dtype and added into the entries' .grad.
//
// Where the unit does not reduce over its replicas, the received row is kept for a later
// reduction instead (PartialReduceOutput), and nothing is published. Destroying it in
// between drops it; what was sent is waited for. Everything runs on the reduce stream
// (transport/reduce_stream.h), but what a ReducedRow does. Collective over the group's
// mesh, in one order on all ranks.
#pragma once

#include "fully_shard/params/fsdp_param_group.h"
#include "fully_shard/transport/copies_to_host.h"

#include <memory>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

namespace fsdp::internal {

// What a reduction brought. It may wait for the last of several backwards, and the
// group's driver keeps it meanwhile: it does not keep the group (not even a weak pointer,
// which would keep it from being destroyed).
class ReducedRow {
 public:
  ReducedRow(std::shared_ptr<Unit> unit, ReduceScatterInput input, at::Tensor row);
  // Divides it on the calling thread's stream; where the shards are in host memory, its
  // copy goes there, to be waited for. Nothing where the group is gone. At most once.
  void bring_home(CopiesToHost& copies);
  // Casts and adds into the entries' .grad, on the calling thread's stream. Nothing where
  // the group is gone. At most once. REQUIRES: at home, and waited for.
  void publish();
  const Unit& unit() const { return *unit_; }

 private:
  c10::intrusive_ptr<FSDPParamGroup> group() const;

  std::shared_ptr<Unit> unit_;  // knows its group as long as there is one
  ReduceScatterInput input_;
  at::Tensor row_;  // [elements], of sum_dtype
};

class GradientReduction {
 public:
  GradientReduction(c10::intrusive_ptr<FSDPParamGroup> group, ReduceScatterInput input);
  ~GradientReduction();
  GradientReduction(GradientReduction&&) noexcept = default;

  void send(ReduceScatterInput::Late late);
  // Starts what can be started by now; does not block. REQUIRES: sent.
  void progress();
  // Waits for the sum over the shards, and shares it with the replicas. REQUIRES: sent.
  // Throws what went wrong, with the unit's name.
  void receive();
  // Waits for the replicas. REQUIRES: receive() was called.
  void wait_for_replicas();
  // Where the ranks tell each other on the host (step/exchange_after_backward.h): what it
  // sent, and what others said, of the replicas where it went over them.
  const ReduceScatterInput& input() const { return input_; }
  void set_used(const std::vector<bool>& used) {
    input_.set_used(used);
    if (pieces_) pieces_->set_used(used);
  }
  void set_words_of_replicas(std::vector<NoticeWords> words) { words_ = std::move(words); }
  // Throws ValueError, on all ranks alike, where replicas did not write the shards alike.
  // Nothing where the row was not added up over them. REQUIRES: wait_for_replicas() was
  // called.
  void check_replica_writes();
  // Some rank had gradients that came after their reduction had left: a rank of the
  // replicas too, where the row was added up over them. REQUIRES: wait_for_replicas() was
  // called.
  bool announces_late() const;
  bool is_over_replicas() const;
  // Keeps the row, if it did not go over the replicas, for a reduction that does. At most
  // once. REQUIRES: wait_for_replicas() was called.
  void keep_unless_over_replicas();
  // What is to be published; nothing where the row is kept. REQUIRES: wait_for_replicas()
  // was called.
  std::optional<ReducedRow> result() &&;

  FSDPParamGroup& group() const { return *group_; }

 private:
  struct Packed {};
  struct Sent {
    std::unique_ptr<PendingReduction> pending;
    int64_t staging_bytes;
  };
  struct Shared {
    std::unique_ptr<PendingReduction> pending;
    int64_t staging_bytes;
  };
  struct Received {
    at::Tensor row;  // [elements], of sum_dtype
    enum class Use { kPublish, kKept } use;
  };
  ReduceStream& reduce_stream() const;
  template <class Stage>
  std::unique_ptr<PendingReduction> take_pending();
  template <class Stage>
  void put_in_flight(std::unique_ptr<PendingReduction> pending);
  template <class Stage>
  at::Tensor wait_for();
  void send_to_replicas(at::Tensor row);
  void send_pieces(const at::Tensor& row);
  std::vector<TrainableParam> pieces_of(const at::Tensor& row) const;
  void receive_whole(at::Tensor row);
  const ReduceScatterInput& input_of_row() const;  // of the last row that was received

  c10::intrusive_ptr<FSDPParamGroup> group_;
  ReduceScatterInput input_;
  std::optional<ReduceScatterInput> pieces_;  // HFSDP: of the reduction over the outer ranks
  std::variant<Packed, Sent, Shared, Received> stage_;
  std::vector<NoticeWords> words_;  // of the ranks, with what was waited for last
};

}  // namespace fsdp::internal
