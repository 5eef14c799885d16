// One reduction of one group on its way, stage by stage:
//
//   packed    full gradients in rows, one per rank
//   sent      the transport adds the rows up (16-bit types in float)
//   received  this rank's row, divided
//   published cast to the parameters' dtype and added into the registry entries' .grad
//
// Destroying it in between drops it; what was sent is waited for. Collective over the
// group's mesh dimension, in one order on all ranks.
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
  // Waits. REQUIRES: sent. Throws what went wrong, with the unit's name.
  void receive();
  // Some rank had gradients that came after their reduction had left. REQUIRES: received.
  bool announces_late() const;
  // REQUIRES: received. At most once.
  void publish();

  ParamGroup& group() const { return *group_; }

 private:
  struct Packed {};
  struct Sent {
    std::unique_ptr<PendingReduction> pending;
    int64_t staging_bytes;
  };
  struct Received {
    at::Tensor row;  // [elements], of sum_dtype
  };
  std::unique_ptr<PendingReduction> take_pending();

  c10::intrusive_ptr<ParamGroup> group_;
  GradientBuffer buffer_;
  std::variant<Packed, Sent, Received> stage_;
};

}  // namespace fsdp::internal
