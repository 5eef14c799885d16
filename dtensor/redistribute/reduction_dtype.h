// In which dtype terms are added up whose own dtype collective backends (Gloo, NCCL) do
// not know, such as int16. What is only moved goes as bytes (collectives.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace fsdp::internal {

// The dtype in which elements of `dtype` are reduced so that the result, cast back, is
// that of `dtype`. Throws NotImplementedError, naming `what` and the dtype, for one in
// which nothing can be added. Local; alike on all ranks.
at::ScalarType dtype_of_reduction(at::ScalarType dtype, const std::string& what);

}  // namespace fsdp::internal
