// What runs first, above autograd, in every operator that meets a tensor-parallel member
// or a DTensor computed from one: plain tensors and DTensors come to one kind, with the
// edges that autograd needs, and styles act (parallel_style_operators.cc).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>

#include <vector>

namespace fsdp::internal {

// Carried by members of a plan, and by the DTensors that operators make of them. Above
// the gate of on_demand/, so that what a style moves is on its way before parameters are
// touched. LibTorch registers nothing for it.
inline constexpr c10::DispatchKey kParallelKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

inline bool meets_parallel_gate(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->key_set().has(kParallelKey);
}

// Registers the kernels under the key. Idempotent, thread-safe; called before the first
// tensor gets it.
void install_parallel_gate();

// Operators without a style: in a model's first step the inputs of layers, and what is
// plain beside activations, are compared (first_inputs.h); registry entries make room for
// their members (on_demand/gate_arguments.h); a plain operand that requires grad
// becomes a replicated DTensor, whose gradient comes back plain; where a plain tensor is
// written, the DTensors come to it, whole. May be collective.
void parallel_gate(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack);

// The same for an operator whose inputs were compared (first_inputs.h) already.
void parallel_gate_compared(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                            torch::jit::Stack* stack);

// Registers the operators at which styles act (parallel_style_operators.cc): linear,
// matmul, mm and addmm with a weight or its transpose; embedding; layer_norm and
// rms_norm. Their input goes where the style wants it, then their result; a result that
// is whole then is handed out plain. Appends the registrations.
void register_styled_operators(std::vector<c10::RegistrationHandleRAII>& handles);

// Whether a formula of autograd's runs. Functions of one's own, and regions that run
// again, are forwards.
bool computes_derivative();

// Runs the operator as it is below this gate; its results carry the key.
void run_below_parallel_gate(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                             torch::jit::Stack* stack);

}  // namespace fsdp::internal
