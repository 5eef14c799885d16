// Running operators on DTensors. An operator that meets a DTensor below autograd comes to
// one boxed kernel (some come to fast_pointwise.h first), which tells the owners of what
// will be written and read, and has the operator run on local tensors: by its rule
// (dtensor/families/rules.h), else by its ways (run_by_ways.h), else replicated. What the
// kernel does may be collective: see each rule, and run_by_ways.h.
#pragma once

#include "dtensor/internal/operator_call.h"

#include <ATen/core/boxing/KernelFunction.h>

#include <optional>

namespace fsdp::internal {

// Takes an OperatorCall whose arguments still hold DTensors and finishes it.
using Rule = void (*)(OperatorCall&);

// The boxed kernel of an operator. None for operators that autograd takes apart.
std::optional<c10::KernelFunction> kernel_of(const c10::OperatorHandle& op);

}  // namespace fsdp::internal
