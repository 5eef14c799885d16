// Unboxed kernels for the elementwise operators that optimizers call once per parameter
// and step. Where all DTensors lie alike they run on the local tensors without a boxed
// argument; any other call goes to the boxed kernel. What they compute and whom they tell
// is what that does (dispatch.h, dtensor/ops/pointwise.cc).
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

namespace fsdp::internal {

// Appends the registrations: of the operators that OpTable::unboxed() lists, and no
// others.
void register_fast_pointwise(std::vector<c10::RegistrationHandleRAII>& handles);

}  // namespace fsdp::internal
