// Runs an operator on DTensors. One that has a strategy (dtensor/strategy/) runs on
// parts: plain operands count as replicated, meshes are checked, operands are
// redistributed as the cheapest placement strategies have them, the operator runs on
// local tensors, and the results are wrapped. One that has none runs on whole values.
#pragma once

#include "dtensor/dispatch/operands.h"
#include "dtensor/dispatch/operator_call.h"
#include "dtensor/dispatch/sharding_propagator.h"
#include "dtensor/strategy/op_schema.h"
#include "dtensor/tensor/dtensor_spec.h"

#include <functional>
#include <vector>

namespace fsdp::internal {

// How a call lies whose arguments are this rank's parts by now.
class PlacedOnMesh {
 public:
  PlacedOnMesh(const DeviceMesh& mesh, const OutputSharding& sharding)
      : mesh_(mesh), sharding_(sharding) {}

  const DeviceMesh& mesh() const { return mesh_; }
  DTensorSpec operand(size_t i) const { return {mesh_, sharding_.placed[i]}; }
  // Where nothing is written, and something is cut or the shape of results is known.
  const TensorLayout& result(size_t i) const { return sharding_.results[i]; }

 private:
  const DeviceMesh& mesh_;
  const OutputSharding& sharding_;
};

// Runs an operator on this rank's parts where more is to be done there than the operator
// itself does. May be collective over mesh dimensions that cut.
using LocalKernel =
    std::function<std::vector<c10::IValue>(OperatorCall& call, const PlacedOnMesh& placed)>;

// The kernel of one operator that has a strategy. Shared by threads.
class StrategyKernel {
 public:
  // Null: the operator runs on the parts as it is.
  StrategyKernel(const OpStrategy& strategy, const c10::OperatorHandle& op,
                 LocalKernel local_kernel = nullptr);

  // Collective over the mesh dimensions along which an operand must move. Which ones
  // follows from specs, shapes and whole numbers alone, so ranks agree. A view of what
  // had to move is one of a gathered copy, and of a registry entry's member
  // (gathered_view.h). Throws ValueError for operands on different meshes. What is
  // written in place, where no strategy allows that, is written as a whole
  // (run_on_whole).
  void run(OperatorCall& call) const;

 private:
  ShardingPropagator propagator_;
  LocalKernel local_kernel_;
};

// Runs an operator that has no strategy: on the whole value, on every rank. Gathers all
// operands and runs the operator; results are replicated. Of what it writes
// in place each rank keeps its part; what was Partial stays so, with the value as one
// term. Collective over the mesh dimensions along which an operand is cut or Partial.
// REQUIRES: results are the same on all ranks, so the operator draws no random numbers.
// Throws NotImplementedError where it gives what it writes another shape; ValueError for
// operands on different meshes.
void run_on_whole(OperatorCall& call);

}  // namespace fsdp::internal
