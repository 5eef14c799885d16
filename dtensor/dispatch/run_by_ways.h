// The one place where an operator that has ways (dtensor/strategy/) runs: plain operands
// count as replicated, meshes are checked, operands go where the cheapest ways have them,
// the operator runs on local tensors, and the results are wrapped.
#pragma once

#include "dtensor/dispatch/call_plan.h"
#include "dtensor/dispatch/operands.h"
#include "dtensor/dispatch/operator_call.h"
#include "dtensor/strategy/operator_ways.h"
#include "dtensor/tensor/dtensor_spec.h"

#include <functional>
#include <vector>

namespace fsdp::internal {

// How a call lies whose arguments are this rank's parts by now.
class PlacedOnMesh {
 public:
  PlacedOnMesh(const DeviceMesh& mesh, const CallPlan& plan) : mesh_(mesh), plan_(plan) {}

  const DeviceMesh& mesh() const { return mesh_; }
  DTensorSpec operand(size_t i) const { return {mesh_, plan_.placed[i]}; }
  // Where nothing is written, and something is cut or the shape of results is known.
  const TensorLayout& result(size_t i) const { return plan_.results[i]; }

 private:
  const DeviceMesh& mesh_;
  const CallPlan& plan_;
};

// Runs an operator on this rank's parts where a way asks for more than the operator
// itself does on parts. May be collective over mesh dimensions that cut.
using RunOnParts =
    std::function<std::vector<c10::IValue>(OperatorCall& call, const PlacedOnMesh& placed)>;

// One operator that runs by ways. Shared by threads.
class WaysKernel {
 public:
  // Null: the operator runs on the parts as it is.
  WaysKernel(const OperatorWays& ways, const c10::OperatorHandle& op,
             RunOnParts run_on_parts = nullptr);

  // Collective over the mesh dimensions along which an operand must move. Which ones
  // follows from specs, shapes and whole numbers alone, so ranks agree. A view of what
  // had to move is one of a gathered copy, and of a registry entry's member
  // (gathered_view.h). Throws ValueError for operands on different meshes. What is
  // written in place and no way has so is written as a whole (run_on_whole.h).
  void run(OperatorCall& call) const;

 private:
  CallPlans plans_;
  RunOnParts run_on_parts_;
};

}  // namespace fsdp::internal
