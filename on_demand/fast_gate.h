// The gate's kernels for operators that are hot in models: the same as the boxed ones of
// on_demand/gate.h, without boxing. They allocate nothing. One line per operator in
// fast_gate.cc.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

namespace fsdp::internal {

// REQUIRES: called once per process (install_gate() does).
void register_fast_gates(std::vector<c10::RegistrationHandleRAII>& handles);

}  // namespace fsdp::internal
