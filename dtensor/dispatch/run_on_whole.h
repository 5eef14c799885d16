// Runs an operator that has no strategy: on the whole value, on every rank.
#pragma once

#include "dtensor/dispatch/operator_call.h"

namespace fsdp::internal {

// Gathers all operands and runs the operator; results are replicated. Of what it writes
// in place each rank keeps its part; what was Partial stays so, with the value as one
// term. Collective over the mesh dimensions along which an operand is cut or Partial.
// REQUIRES: results are the same on all ranks, so the operator draws no random numbers.
// Throws NotImplementedError where it gives what it writes another shape; ValueError for
// operands on different meshes.
void run_on_whole(OperatorCall& call);

}  // namespace fsdp::internal
