// The memory of a tensor as bytes.
#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::internal {

// uint8 [nbytes], the memory of `tensor` itself. A tensor of one element is contiguous
// whatever its strides are, which view() refuses. REQUIRES: it is contiguous, and has no
// bits that are still to be resolved (conj, neg). Local.
inline at::Tensor tensor_bytes(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1}).view(at::kByte);
}

}  // namespace fsdp::internal
