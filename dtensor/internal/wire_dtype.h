// How tensors travel whose dtype collective backends (Gloo, NCCL) do not know, such as
// int16 and the float8 types.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace fsdp::internal {

// For collectives that only move elements: `tensor` itself, or its bytes, over the same
// memory. REQUIRES: it is contiguous and has a dimension. Local.
at::Tensor as_sent(const at::Tensor& tensor);

// The dtype in which elements of `dtype` are reduced so that the result, cast back, is
// that of `dtype`. Throws NotImplementedError, naming `what` and the dtype, for one in
// which nothing can be added. Local; alike on all ranks.
at::ScalarType dtype_of_reduction(at::ScalarType dtype, const std::string& what);

}  // namespace fsdp::internal
