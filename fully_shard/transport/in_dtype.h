// A cast that costs the dispatcher nothing where there is nothing to cast. Local.
#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::internal {

// As tensor.to(dtype).
inline at::Tensor in_dtype(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : tensor.to(dtype);
}

}  // namespace fsdp::internal
