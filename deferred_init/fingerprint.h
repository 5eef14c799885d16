// By what ranks tell whether their tapes would compute the same.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp::internal {

// Of the operators that `tensor`, which is deferred, depends on, and the states of the
// generators that they draw from. Other arguments do not count.
uint64_t fingerprint_of(const at::Tensor& tensor);

}  // namespace fsdp::internal
