// The one place where an operator that has ways (dtensor/ways/) runs: plain operands
// count as replicated, meshes are checked, operands go where the cheapest ways have them,
// the operator runs on local tensors, and the results are wrapped.
#pragma once

#include "dtensor/internal/call_plan.h"
#include "dtensor/internal/dtensor_spec.h"
#include "dtensor/internal/operands.h"
#include "dtensor/internal/operator_call.h"
#include "dtensor/ways/operator_ways.h"

#include <vector>

namespace fsdp::internal {

// Runs an operator on this rank's parts, which are the call's arguments by now, where a
// way asks for more than the operator itself does on parts. `placed` says how each
// operand lies. May be collective over mesh dimensions that cut.
using RunOnParts = std::vector<c10::IValue> (*)(OperatorCall& call,
                                                const std::vector<DTensorSpec>& placed);

// One operator that runs by ways. Shared by threads.
class WaysKernel {
 public:
  // Null: the operator runs on the parts as it is.
  WaysKernel(const OperatorWays& ways, const c10::OperatorHandle& op,
             RunOnParts run_on_parts = nullptr);

  // Collective over the mesh dimensions along which an operand must move. Which ones
  // follows from specs, shapes and whole numbers alone, so ranks agree. A view of what had
  // to move is one of a gathered copy (gathered_view.h). Throws ValueError for operands on
  // different meshes, and for a plain tensor beside a registry entry; NotImplementedError
  // for an in-place write to what does not lie as a way has it.
  void run(OperatorCall& call) const;

 private:
  void run_on_parts(OperatorCall& call, at::TensorList operands, const CallPlan& plan,
                    const DeviceMesh& mesh) const;

  CallPlans plans_;
  RunOnParts run_on_parts_;
};

// The same for an operator without any way but to run replicated: all operands are
// gathered. The results must be the same on all ranks, so the operator must not draw
// random numbers; it must write nothing.
void run_replicated(OperatorCall& call);

}  // namespace fsdp::internal
