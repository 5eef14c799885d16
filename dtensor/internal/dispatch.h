// Running operators on DTensors. Every operator that meets a DTensor below autograd comes
// to one boxed kernel, which looks up the operator's rule (dtensor/families/rules.h),
// tells the owners of what will be written and read, and lets the rule run the operator
// on local tensors.
// What the kernel does may be collective: see each rule.
#pragma once

#include "dtensor/internal/operator_call.h"

namespace fsdp::internal {

// Takes an OperatorCall whose arguments still hold DTensors and finishes it.
using Rule = void (*)(OperatorCall&);

}  // namespace fsdp::internal
