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

}  // namespace fsdp::internal
