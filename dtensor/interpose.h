// The dispatch keys this library takes for itself, and what sits under them. Nobody else names a key.
//
// kGateKey, above autograd: carried by tensors whose storage is on demand, and by their registry entries. The gate
// (dtensor/gate.cc) runs first in every operator that meets one.
// kDTensorKey, below autograd: carried by DTensors. dtensor/dispatch.cc applies the operators' sharding rules.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/StorageImpl.h>

#include <string>

namespace fsdp::internal {

inline constexpr c10::DispatchKey kGateKey = c10::DispatchKey::DeferredInit;
inline constexpr c10::DispatchKey kDTensorKey = c10::DispatchKey::CustomRNGKeyId;

// Registers the kernels under both keys. Idempotent, thread-safe; called when the first DTensor is made.
void install_interposition();
void install_dtensor_kernels();  // dtensor/dispatch.cc
void install_gate_kernels();     // dtensor/gate.cc
void install_set_data_kernels();  // dtensor/set_data_gate.cc

}  // namespace fsdp::internal
