// The one place where an operator that has ways (dtensor/ways/) runs: plain operands
// count as replicated, meshes are checked, operands go where the cheapest ways have them,
// the operator runs on local tensors, and the results are wrapped.
#pragma once

#include "device_mesh/device_mesh.h"
#include "dtensor/internal/dtensor_spec.h"
#include "dtensor/internal/operands.h"
#include "dtensor/internal/operator_call.h"
#include "dtensor/ways/bounded_memo.h"
#include "dtensor/ways/operator_ways.h"

#include <memory>
#include <optional>
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
  // follows from specs, shapes and whole numbers alone, so ranks agree. Throws ValueError
  // for operands on different meshes, and for a plain tensor beside a registry entry;
  // NotImplementedError for an in-place write to what does not lie as a way has it.
  void run(OperatorCall& call) const;

 private:
  struct Plan {
    Propagation placements;
    // None where all operands are replicated, or one is written.
    std::vector<ResultGeometry> results;
  };
  std::shared_ptr<const Plan> plan_of(const OperatorCall& call,
                                      const std::vector<at::Tensor>& operands,
                                      const DeviceMesh& mesh) const;
  Plan make_plan(const OperatorCall& call, const std::vector<at::Tensor>& operands,
                 const DeviceMesh& mesh) const;

  std::vector<c10::IValue> run_on_parts(OperatorCall& call, const std::vector<at::Tensor>& operands,
                                        const DeviceMesh& mesh, const Plan& plan) const;

  OperatorWays ways_;
  RunOnParts run_on_parts_;
  ArgumentKinds kinds_;
  std::optional<size_t> written_;  // the operand that is written in place and handed back
  mutable BoundedMemo<Plan> memo_;
};

// The same for an operator without any way but to run replicated: all operands are
// gathered. The results must be the same on all ranks, so the operator must not draw
// random numbers; it must write nothing.
void run_replicated(OperatorCall& call);

}  // namespace fsdp::internal
