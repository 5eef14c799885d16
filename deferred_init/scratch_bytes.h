// Memory that is used for a moment, as large as a model's largest parameter.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp::internal {

// uint8 [nbytes], not initialised. Large ones have pages of their own, which go back to
// the system with the tensor: malloc would keep a hole after each, too small by its
// alignment for the next, and a model computed parameter by parameter would be there in
// holes.
at::Tensor scratch_bytes(int64_t nbytes);

}  // namespace fsdp::internal
