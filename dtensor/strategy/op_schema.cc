#include "dtensor/strategy/op_schema.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace fsdp::internal {

int64_t Operand::size(int64_t dim) const {
  return shape[static_cast<size_t>(wrapped_dim(dim, ndim()))];
}

int64_t Operand::bytes() const {
  int64_t bytes = dtype.element_size;
  for (const int64_t size : shape) bytes *= size;
  return bytes;
}

int64_t wrapped_dim(int64_t dim, int64_t ndim) {
  const int64_t count = std::max<int64_t>(ndim, 1);
  if (dim < -count || dim >= count) {
    throw std::out_of_range("dimension " + std::to_string(dim) + " is out of range: allowed are " +
                            std::to_string(-count) + " to " + std::to_string(count - 1));
  }
  return dim < 0 ? dim + count : dim;
}

}  // namespace fsdp::internal
