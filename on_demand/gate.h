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
// (on_demand/fast_gate.h); these take any operator.
#pragma once

#include "on_demand/on_demand_storage.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <vector>

namespace c10 {
class OperatorHandle;
}

namespace fsdp::internal {

// For operators that read or write elements. Collective where a group must be gathered.
void touching_gate(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack);
// For operators that only alias: printing a shape through a view is not a collective.
void aliasing_gate(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack);

// REQUIRES: called once per process (install_gate() does).
void register_gate_kernels();

// The parameters that one operator writes. It may change their values, not their shape:
// out= with a result of another size and transpose_() would part a parameter from its
// shards. REQUIRES: the members outlive this object.
class WrittenMembers {
 public:
  // Views of parameters are left out: their shape is their own.
  void add(const OnDemandStorage& storage, c10::TensorImpl* impl);
  // Gives every parameter its shape back, and throws for the first that lost it.
  void check_shapes(const c10::OperatorHandle& op) const;

 private:
  struct Member {
    const OnDemandStorage* storage;
    c10::TensorImpl* impl;
    std::vector<int64_t> sizes, strides;
  };
  c10::SmallVector<Member, 1> members_;
};

}  // namespace fsdp::internal
