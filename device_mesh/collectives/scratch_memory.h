// Memory for rows that are sent, received and unpacked: taken and given back several
// times per unit and step.
#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::internal {

// A new tensor whose elements have any value, contiguous, without a graph. On the CPU
// small ones come from blocks that are kept for the next of the same size
// (c10::CPUCachingAllocator): giving a block of some kilobytes back to malloc makes it
// tidy up all that is free, which takes longer than the rest of what a small unit costs.
// Not under sanitizers, which are to see what is used after it was given back. Local;
// thread-safe.
at::Tensor scratch_memory(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device);

// uint8 [nbytes], the memory of `tensor` itself. A tensor of one element is contiguous
// whatever its strides are, which view() refuses. REQUIRES: it is contiguous, and has no
// bits that are still to be resolved (conj, neg). Local.
inline at::Tensor tensor_bytes(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1}).view(at::kByte);
}

}  // namespace fsdp::internal
