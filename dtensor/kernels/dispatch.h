// Running operators on DTensors. An operator that meets a DTensor below autograd comes to
// one boxed kernel (some come to fast_pointwise.h first), which tells the owners of what
// will be written and read, and has the operator run on local tensors as the table says
// (dtensor/ops/op_table.h), else on whole values. What the kernel does may be collective:
// see each entry, and run_by_strategy.h.
#pragma once

#include "dtensor/dispatch/operator_call.h"

#include <ATen/core/boxing/KernelFunction.h>

#include <optional>

namespace fsdp::internal {

// The boxed kernel of an operator. None for operators that autograd takes apart.
std::optional<c10::KernelFunction> kernel_of(const c10::OperatorHandle& op);

}  // namespace fsdp::internal
