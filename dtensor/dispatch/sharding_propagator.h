// The sharding propagator of an operator (PyTorch's ShardingPropagator): the placements
// to which a call's operands are redistributed and those of its results, found once for
// all calls that look alike.
#pragma once

#include "device_mesh/device_mesh.h"
#include "dtensor/dispatch/operands.h"
#include "dtensor/dispatch/operator_call.h"
#include "dtensor/layout/tensor_layout.h"
#include "dtensor/strategy/bounded_memo.h"
#include "dtensor/strategy/op_schema.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

namespace fsdp::internal {

struct OutputSharding {
  std::vector<TensorPlacements> targets;  // by operand
  bool moves;                             // whether some operand does not lie there yet
  // None where the results are replicated and LibTorch has to say how they lie, or where
  // an operand is written.
  std::vector<TensorLayout> results;
  std::vector<TensorLayout> placed;  // the operands once they lie there
  std::vector<PartArgument> part_arguments;
  // Those that the call came with: they are known by address while somebody holds them.
  std::vector<TensorLayout> arrived;
};

// What of an operator's schema decides how its calls are planned.
struct PlannedOperator {
  PlannedOperator(OpStrategy strategy, const c10::OperatorHandle& op);
  // One that works element by element, whatever its other arguments are.
  PlannedOperator(OpStrategy strategy, std::optional<size_t> written);

  OpStrategy strategy;
  ArgumentKinds kinds;
  std::optional<size_t> written = {};  // the operand that is written in place and handed back
  size_t results = 1;
  bool returns_a_list = false;  // of any number of results
  bool is_view = false;         // of operand 0
};

// The global geometry of results, from the operator itself on tensors without memory.
// Of an operator that has a meta kernel and gives tensors. Throws what that throws: a
// caller's mistake shows here. Leaves the call as it is. Local.
std::vector<ResultGeometry> meta_results(const OperatorCall& call, const ArgumentKinds& kinds);

// Of one operator. Shared by threads.
class ShardingPropagator {
 public:
  explicit ShardingPropagator(PlannedOperator op);

  const PlannedOperator& op() const { return op_; }

  // For a call on these operands, of which a DTensor lies on `mesh`, as they all do.
  // Local. Throws what the operator throws for its operands; ValueError where the result
  // does not fit what it is written to.
  std::shared_ptr<const OutputSharding> sharding_of(const OperatorCall& call,
                                                    at::TensorList operands,
                                                    const DeviceMesh& mesh) const;

 private:
  OutputSharding make(const OperatorCall& call, at::TensorList operands,
                      const DeviceMesh& mesh) const;
  Propagation propagation_of(const OpSchema& geometry, at::TensorList operands,
                             const DeviceMesh& mesh, size_t results) const;
  std::vector<ResultGeometry> results_of(const OperatorCall& call, const OpSchema& geometry) const;

  PlannedOperator op_;
  mutable BoundedMemo<OutputSharding> memo_;
};

}  // namespace fsdp::internal
