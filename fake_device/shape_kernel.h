// Any operator on the fake device, by its meta kernel, and what it costs.
#pragma once

#include <ATen/core/stack.h>

namespace c10 {
class OperatorHandle;
}

namespace fsdp::internal {

// Runs the meta kernel on tensors of the arguments' shapes and makes results of the
// shapes that it gives; arguments that it writes are returned as they are, resized where
// it resizes them. Throws NotImplementedError, naming the operator, where there is no
// meta kernel.
void shape_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Whether it has one, or needs none since it goes from element to element.
bool has_shape_kernel(const c10::OperatorHandle& op);

// Adds to fake_flops() what a kernel of its own costs, multiplications and additions
// counted each.
void count_flops(double flops);

}  // namespace fsdp::internal
