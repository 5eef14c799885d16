// The dispatch keys that DTensors carry.
#pragma once

#include <c10/core/DispatchKey.h>

namespace fsdp::internal {

// Below autograd: operators' sharding rules (dispatch.cc).
inline constexpr c10::DispatchKey kDTensorKey = c10::DispatchKey::CustomRNGKeyId;
// Above all others, and included by threads that have generators of their own: views
// (view_replay.h) and random operators (generator_dispatch.h). All else falls through.
// LibTorch registers nothing for it.
inline constexpr c10::DispatchKey kFirstKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

// Registers the kernels under the keys. Idempotent, thread-safe; called when the first
// DTensor is made.
void install_dtensor_kernels();

}  // namespace fsdp::internal
