// Running operators on DTensors. An operator that meets a DTensor below autograd comes to
// one boxed kernel (some come to fast_pointwise.h first), which looks up the operator's
// rule (dtensor/families/rules.h), tells the owners of what will be written and read, and
// lets the rule run the operator on local tensors. What the kernel does may be
// collective: see each rule.
#pragma once

#include "dtensor/internal/operator_call.h"

namespace fsdp::internal {

// Takes an OperatorCall whose arguments still hold DTensors and finishes it.
using Rule = void (*)(OperatorCall&);

// What the DTensor kernel of an operator does.
void run_rule(Rule rule, const OperatorTraits& traits, const c10::OperatorHandle& op,
              c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace fsdp::internal
