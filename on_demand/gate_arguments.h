// The arguments of an operator at the gate: what the tensors among them are, and what
// operators compute with in their place:
//
//   substitute_entries()     of registry entries their members, or gathered values
//   replicate_members()      of members beside DTensors of the user's own: replicated DTensors
//   call_with_cast_inputs()  of inputs beside a parameter that casts them: its dtype
#pragma once

#include "dtensor/dispatch/tensor_arguments.h"
#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "on_demand/gate_key.h"
#include "on_demand/on_demand_storage.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>

#include <optional>

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

// Puts plain tensors in the place of registry entries, in operators that write no
// DTensor:
//
//   under grad mode, of entries that require grad: their members
//   of the other entries, and views of entries, in operators that are given a plain tensor
//   or a DTensor on another mesh, too (dtensor/dispatch/implicit_replication.h): the member
//   (entry), or the value gathered for this operator (view, and what else lies on that mesh)
//
// so a module computes with entries (ParameterList, named_parameters()["w"], a custom
// autograd::Function) what it would with members, in any mode, and what happens among
// entries alone (optimizers) stays sharded. True when there were any: the operator must
// then be dispatched anew, since its key set was that of the entries. What is gathered is
// collective; whether something is depends on the operator's arguments alone, not on the
// rank.
bool substitute_entries(GateArguments& arguments);

// Members that meet DTensors of the user's own in operators that record gradients, as in
// (weight - reference).pow(2) with a reference from distribute_tensor. What comes from a
// parameter is none of them: it is gathered (dtensor/dispatch/implicit_replication.h).

// Puts replicated DTensors, over the same memory, in the place of members that require
// grad, and views of them, where an operator that records a graph has such a DTensor.
// So the operator runs on parts, and what arrives at the member is plain: autograd adds
// it to this rank's own gradients, and a part or a term of a DTensor's can not be added
// to those (OnDemandGroup::gradient_share). True when there were any: the operator must
// then be dispatched anew. Local; the backward may be collective, and throws
// NotImplementedError where it is to be differentiated itself.
bool replicate_members(GateArguments& arguments);

// Whether autograd records what is done with `tensor`, a member, plain or
// tensor-parallel, or a view of one. Local.
bool is_recorded_member(const at::Tensor& tensor);
// A DTensor over the memory of `member`, of `spec`: it is whole along the dimensions that
// are not the member's own. What arrives at the member is as replicate_members() has it,
// and lies as it came along the member's own. REQUIRES: is_recorded_member().
at::Tensor replicated_member(const at::Tensor& member, const DTensorSpec& spec);

// Whether an operator with these among its arguments is to be asked at all.
inline bool may_replicate_members(bool has_plain_member, bool has_dtensor) {
  return has_plain_member && has_dtensor && at::GradMode::is_enabled();
}

// Mixed precision at the gate: operators that meet a parameter which casts inputs
// (OnDemandStorage::cast_inputs) compute with its dtype.

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
