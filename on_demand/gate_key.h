// The dispatch key of the gate, above autograd: carried by tensors whose storage is on
// demand, and by DTensors that stand for one (registry entries). The gate
// (on_demand/gate.cc) runs first in every operator that meets it.
#pragma once

#include <c10/core/DispatchKey.h>

namespace fsdp::internal {

inline constexpr c10::DispatchKey kGateKey = c10::DispatchKey::DeferredInit;

// Registers the kernels under the key. Idempotent, thread-safe; called before the first
// tensor gets it.
void install_gate();

}  // namespace fsdp::internal
