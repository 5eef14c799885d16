// The gate: the kernel under kGateKey (on_demand/gate_key.h), the first thing any
// operator does with an on-demand tensor, in forward and (through autograd's saved views)
// in backward. It replaces registry entries by what stands for them, brings requires_grad
// up to date, makes every touched group readable for the length of the operator, and runs
// the operator.
//
// The key is excluded only while aten operators run: a custom operator's body may touch
// other parameters.
#pragma once

namespace fsdp::internal {

// REQUIRES: called once per process (install_gate() does).
void register_gate_kernels();

}  // namespace fsdp::internal
