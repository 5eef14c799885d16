// The dispatch key of the gate, above autograd: carried by tensors whose storage is on
// demand, by DTensors that stand for one (registry entries), and by tensors without
// values (deferred_init/). The gate (on_demand/gate.cc) runs first in every operator
// that meets it.
#pragma once

#include <c10/core/DispatchKeySet.h>

namespace fsdp::internal {

inline constexpr c10::DispatchKey kGateKey = c10::DispatchKey::DeferredInit;

// The keys of an operator that the gate passed.
inline c10::DispatchKeySet below_gate(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kGateKey);
}

// Registers the kernels under the key. Idempotent, thread-safe; called before the first
// tensor gets it.
void install_gate();

}  // namespace fsdp::internal
