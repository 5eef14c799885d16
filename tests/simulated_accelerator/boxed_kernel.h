// The kernel of every operator that CPU has one for: the CPU's own, run as
// an item of the current stream. So the device gives the CPU's bits.
//
// - Shapes and dtypes of results come from a run on zeros, or on ones where that throws (a
//   divisor), or on the true values where both do, which drains the stream.
// - Operators whose result or shape depends on values drain the stream: a host sync.
// - Random operators take the state of the device's generator when they are issued.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace fsdp::testing::simulated {

void boxed_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace fsdp::testing::simulated
