// The dispatch key that DTensors carry, below autograd. dtensor/internal/dispatch.cc
// applies the operators' sharding rules under it.
#pragma once

#include <c10/core/DispatchKey.h>

namespace fsdp::internal {

inline constexpr c10::DispatchKey kDTensorKey = c10::DispatchKey::CustomRNGKeyId;

// Registers the kernels under the key. Idempotent, thread-safe; called when the first
// DTensor is made.
void install_dtensor_kernels();

}  // namespace fsdp::internal
