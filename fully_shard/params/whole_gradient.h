// Gradients of registry entries that are whole and plain. A custom autograd::Function
// that is given an entry computes with the whole value, so its backward returns a
// gradient of this rank's whole parameter, like a member's, and autograd would put it on
// the entry as it is: neither reduced nor sharded. It is led to the member instead, where
// whole gradients are reduced from.
#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::internal {

// To be called while a graph that ends in `entry` is recorded and the whole value is
// used; nothing where no graph ends there. Gradients that are DTensors stay the entry's.
// Local.
void lead_whole_gradients(const at::Tensor& entry, const at::Tensor& member);

}  // namespace fsdp::internal
