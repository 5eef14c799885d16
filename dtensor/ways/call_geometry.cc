#include "dtensor/ways/call_geometry.h"

namespace fsdp::internal {

int64_t Operand::size(int64_t dim) const {
  return shape[static_cast<size_t>(wrapped_dim(dim, ndim()))];
}

int64_t Operand::bytes() const {
  int64_t bytes = element_size;
  for (int64_t size : shape) bytes *= size;
  return bytes;
}

int64_t wrapped_dim(int64_t dim, int64_t ndim) { return dim < 0 && ndim > 0 ? dim + ndim : dim; }

}  // namespace fsdp::internal
