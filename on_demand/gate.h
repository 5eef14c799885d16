// The gate: the kernels under kGateKey (on_demand/gate_key.h), the first thing any
// operator does with an on-demand tensor, in forward and (through autograd's saved views)
// in backward. It replaces registry entries by what stands for them, brings requires_grad
// up to date, makes every touched group readable for the length of the operator, and runs
// the operator. A group that is ready for the running pass costs a flag test.
//
// Tensors without values (deferred_init/) carry the key too: what makes or changes
// one is recorded instead.
//
// The key is excluded only while aten operators run: a custom operator's body may touch
// other parameters. Operators that are hot in models have kernels of their own
// (on_demand/fast_gate.cc); these take any operator.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>

#include <vector>

namespace fsdp::internal {

// For operators that read or write elements. Collective where a group must be gathered.
void touching_gate(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack);
// For operators that only alias: printing a shape through a view is not a collective.
void aliasing_gate(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack);

// The kernels for operators that are hot in models: the same as the boxed ones above,
// without boxing. They allocate nothing. The operators are listed at the end of
// fast_gate.cc. REQUIRES: called once per process (install_gate() does).
void register_fast_gates(std::vector<c10::RegistrationHandleRAII>& handles);

}  // namespace fsdp::internal
