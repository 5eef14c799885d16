// Running operators on DTensors. An operator that meets a DTensor below autograd comes to
// one boxed kernel (some come to fast_pointwise.h first), which tells the owners of what
// will be written and read, and has the operator run on local tensors: by its rule
// (dtensor/families/rules.h), else by its ways (run_by_ways.h), else replicated. What the
// kernel does may be collective: see each rule, and run_by_ways.h.
#pragma once

#include "dtensor/internal/operator_call.h"

namespace fsdp::internal {

// Takes an OperatorCall whose arguments still hold DTensors and finishes it.
using Rule = void (*)(OperatorCall&);

// What the DTensor kernel of an operator does.
void run_rule(Rule rule, const OperatorTraits& traits, const c10::OperatorHandle& op,
              c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace fsdp::internal
