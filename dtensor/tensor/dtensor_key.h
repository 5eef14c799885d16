// The dispatch keys that DTensors carry.
#pragma once

#include <c10/core/DispatchKeySet.h>

namespace fsdp::internal {

// Below autograd: operators on DTensors (kernels/dispatch.cc).
inline constexpr c10::DispatchKey kDTensorKey = c10::DispatchKey::CustomRNGKeyId;
// Above all others, and included by threads that have generators of their own: views
// (view_replay.h) and random operators (generator_dispatch.h). All else falls through.
// LibTorch registers nothing for it.
inline constexpr c10::DispatchKey kFirstKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

// The keys that a kernel under `key`, which a call met with `keys`, passes on.
inline c10::DispatchKeySet keys_below(c10::DispatchKey key, c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key);
}

// Registers the kernels under the keys. Idempotent, thread-safe; called when the first
// DTensor is made.
void install_dtensor_kernels();

}  // namespace fsdp::internal
