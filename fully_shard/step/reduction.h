// One reduction of one group on its way, stage by stage:
//
//   packed    full gradients in rows, one per rank
//   sent      the transport adds the rows up (16-bit types in float)
//   shared    hybrid sharding: this rank's row is added up over the replicas as well
//   received  this rank's row, summed
//   published divided, cast to the parameters' dtype and added into the entries' .grad
//
// Where the unit does not reduce over its replicas, the received row is kept for a later
// reduction instead (GroupGradients::keep_shard_sum), and nothing is published.
// Destroying it in between drops it; what was sent is waited for. Collective over the
// group's mesh, in one order on all ranks.
#pragma once

#include "fully_shard/params/param_group.h"

#include <memory>
#include <variant>
#include <vector>

namespace fsdp::internal {

class Reduction {
 public:
  Reduction(c10::intrusive_ptr<ParamGroup> group, GradientBuffer buffer);
  ~Reduction();
  Reduction(Reduction&&) noexcept = default;

  void send(GradientBuffer::Late late);
  // Starts what can be started by now; does not block. REQUIRES: sent.
  void progress();
  // Waits for the sum over the shards, and shares it with the replicas. REQUIRES: sent.
  // Throws what went wrong, with the unit's name.
  void receive();
  // Waits for the replicas. REQUIRES: receive() was called.
  void settle();
  // Some rank had gradients that came after their reduction had left. REQUIRES: settled.
  bool announces_late() const;
  // REQUIRES: settled. At most once.
  void publish();

  ParamGroup& group() const { return *group_; }

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
  template <class Stage>
  std::unique_ptr<PendingReduction> take_pending();
  template <class Stage>
  void put_in_flight(std::unique_ptr<PendingReduction> pending);
  template <class Stage>
  at::Tensor wait_for();
  void keep(const at::Tensor& row);

  c10::intrusive_ptr<ParamGroup> group_;
  GradientBuffer buffer_;
  std::variant<Packed, Sent, Shared, Received> stage_;
};

}  // namespace fsdp::internal
