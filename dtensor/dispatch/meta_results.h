// Global geometry of results, from the operator itself on tensors without memory.
#pragma once

#include "dtensor/dispatch/operands.h"
#include "dtensor/dispatch/operator_call.h"
#include "dtensor/strategy/op_strategy.h"

#include <vector>

namespace fsdp::internal {

// Of an operator that has a meta kernel and gives tensors. Throws what that throws: a
// caller's mistake shows here. Leaves the call as it is. Local.
std::vector<ResultGeometry> meta_results(const OperatorCall& call, const ArgumentKinds& kinds);

}  // namespace fsdp::internal
