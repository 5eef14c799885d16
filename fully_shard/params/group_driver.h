// Who runs the groups of one rank on one process group: decides what follows from a touch
// and from a gradient. Implemented by step/runtime.h; a group only tells it. One thread
// at a time.
#pragma once

#include <cstdint>

namespace fsdp::internal {

class ParamGroup;

class GroupDriver {
 public:
  virtual ~GroupDriver() = default;
  // An operator is about to use the group, which must be resident and current when this
  // returns. Collective unless it is.
  virtual void touched(ParamGroup& group) = 0;
  // Autograd has left the full gradient of parameter `index` on its member.
  virtual void gradient_arrived(ParamGroup& group, int64_t index) = 0;
  virtual void destroyed(ParamGroup& group) noexcept = 0;
};

}  // namespace fsdp::internal
