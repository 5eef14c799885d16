// Mixed precision at the gate: operators that meet a parameter which casts inputs
// (OnDemandStorage::cast_inputs) compute with its dtype.
#pragma once

#include "on_demand/gate_arguments.h"
#include "on_demand/on_demand_storage.h"

#include <c10/core/ScalarType.h>

#include <optional>

namespace fsdp::internal {

// The dtype in which an operator computes: of the first parameter it meets that casts
// inputs.
class ComputeDtype {
 public:
  // `storage` is that of `tensor`, an argument.
  void meet(const OnDemandStorage& storage, const at::Tensor& tensor) {
    if (!storage.casts_inputs() || dtype_ || !at::isFloatingType(tensor.scalar_type())) return;
    dtype_ = tensor.scalar_type();
  }
  bool is_asked_for() const { return dtype_.has_value(); }
  const std::optional<at::ScalarType>& dtype() const { return dtype_; }
  // Whether `tensor` is to be cast: a plain floating tensor of another dtype and of one
  // dimension or more.
  bool is_to_cast(const at::Tensor& tensor) const;
  // REQUIRES: is_to_cast(tensor). Differentiable.
  at::Tensor cast(const at::Tensor& tensor) const { return tensor.to(*dtype_); }

 private:
  std::optional<at::ScalarType> dtype_;
};

// The dtype to which `input` is cast where an operator meets `parameter` besides; none
// where it stays as it is.
std::optional<at::ScalarType> dtype_beside(const at::Tensor& parameter, const at::Tensor& input);

// Where an operator meets a parameter that casts inputs: puts casts in the place of such
// tensors, differentiably, and dispatches it anew. Running statistics that it updates
// (batch_norm, whose schema does not say so) are updated. Not operators that write an
// argument, convert dtypes, take lists of a _foreach_, or are derivatives (..._backward).
// False, with nothing done, where there is nothing to cast. REQUIRES: `arguments` are
// those of `op` on `stack`. Local.
bool call_with_cast_inputs(const c10::OperatorHandle& op, GateArguments& arguments,
                           torch::jit::Stack* stack);

}  // namespace fsdp::internal
