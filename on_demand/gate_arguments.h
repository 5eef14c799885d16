// What the tensors among the arguments of an operator at the gate are.
#pragma once

#include "dtensor/dispatch/tensor_arguments.h"
#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "dtensor/tensor/dtensor_key.h"
#include "on_demand/gate_key.h"

#include <ATen/core/Tensor.h>

namespace fsdp::internal {

inline bool meets_gate(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->key_set().has(kGateKey);
}
// A registry entry, or a view of one.
inline bool is_entry_or_view(const at::Tensor& tensor) {
  const auto keys = tensor.unsafeGetTensorImpl()->key_set();
  return keys.has_all(c10::DispatchKeySet({kGateKey, kDTensorKey})) && owner_of(tensor) != nullptr;
}

// Viewing a DTensor may gather it, which reads its values (dtensor/ops/).
inline bool may_read_to_alias(const at::Tensor& tensor) { return is_dtensor(tensor); }

using GateArguments = TensorArguments;

}  // namespace fsdp::internal
