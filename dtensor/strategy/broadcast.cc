#include "dtensor/strategy/broadcast.h"

namespace fsdp::internal {

Placement broadcast_along(const Operand& operand, int64_t ndim, int64_t dim, int64_t size) {
  const int64_t own = dim - (ndim - operand.ndim());
  if (!operand.is_present() || own < 0 || operand.size(own) != size) return Replicate{};
  return Shard{own};
}

}  // namespace fsdp::internal
