// Operators that go from element to element and have no meta kernel.
#pragma once

#include <ATen/core/stack.h>

namespace c10 {
class OperatorHandle;
}

namespace fsdp::internal {

// Whether it is one, of one result.
bool is_pointwise(const c10::OperatorHandle& op);

// The result has the shape that the operands are broadcast to, and the dtype that they
// are promoted to, unless it is written where the caller says.
void pointwise_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace fsdp::internal
