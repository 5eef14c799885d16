// Who runs the groups of one rank on one process group: decides what follows from a touch
// and from a gradient. Implemented by step/runtime.h; a group and its parts only tell it.
// One thread at a time.
#pragma once

#include "on_demand/pass.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp::internal {

class FSDPParamGroup;

class GroupDriver {
 public:
  virtual ~GroupDriver() = default;
  // An operator is about to use the group, which must be unsharded and current when this
  // returns. Collective unless it is.
  virtual void touched(FSDPParamGroup& group) = 0;
  // `member` is parameter `index` of the group: gradient_arrived() is to be called for
  // it, as long as the group lives.
  virtual void watch_gradient(const at::Tensor& member, FSDPParamGroup& group, int64_t index) = 0;
  // Autograd has left the full gradient of parameter `index` on its member.
  virtual void gradient_arrived(FSDPParamGroup& group, int64_t index) = 0;
  virtual void destroyed(FSDPParamGroup& group) noexcept = 0;
  // The backward of these groups, which may end on another thread than the caller's; null
  // on the CPU, where it does not.
  virtual OpenBackward* open_backward() = 0;
};

}  // namespace fsdp::internal
