// Runs an operator that has a strategy (dtensor/strategy/): plain operands count as
// replicated, meshes are checked, operands are redistributed as the cheapest placement
// strategies have them, the operator runs on local tensors, and the results are wrapped.
#pragma once

#include "dtensor/dispatch/operands.h"
#include "dtensor/dispatch/operator_call.h"
#include "dtensor/dispatch/sharding_propagator.h"
#include "dtensor/strategy/op_strategy.h"
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
  // (run_on_whole.h).
  void run(OperatorCall& call) const;

 private:
  ShardingPropagator propagator_;
  LocalKernel local_kernel_;
};

}  // namespace fsdp::internal
