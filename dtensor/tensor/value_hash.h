// By what ranks tell whether their tensors have the same values.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp::internal {

// Of the elements of a plain tensor, in order; `seed` where it has none. Waits for its
// device. Local.
uint64_t hash_of_values(const at::Tensor& plain, uint64_t seed);

}  // namespace fsdp::internal
