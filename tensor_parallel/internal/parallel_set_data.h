// Tensor::set_data on a tensor-parallel parameter. It replaces a tensor's data behind the
// dispatcher's back, but asks _has_compatible_shallow_copy_type first.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

namespace fsdp::internal {

// Under the parallel gate's key. A parameter takes DTensors that lie as it does
// (Module::to(dtype)), and keeps its style. Plain tensors, other DTensors, and plain
// tensors that are to become one (Module::clone) are a ValueError. Appends the
// registrations.
void register_parallel_set_data(std::vector<c10::RegistrationHandleRAII>& handles);

}  // namespace fsdp::internal
