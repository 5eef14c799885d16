// How the operands of an elementwise operator must lie so that it can run on local
// tensors.
#pragma once

#include "dtensor/internal/dtensor_spec.h"
#include "dtensor/internal/operator_call.h"
#include "dtensor/ways/pointwise_ways.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace fsdp::internal {

struct PointwisePlan {
  DTensorSpec result;  // of the output; the written operand's own for in-place operators
  std::vector<at::Tensor> locals;  // one per operand
};

// The tensors among one call's arguments.
struct PointwiseOperands {
  // Throws NotImplementedError for an operator that writes several arguments in place.
  explicit PointwiseOperands(const OperatorCall& call);

  std::vector<size_t> arguments;  // by operand: its place among the call's arguments
  std::vector<at::Tensor> tensors;
  std::optional<size_t> written;  // index into tensors
};

struct PointwiseProblem {
  const OperatorCall& call;  // for messages
  const std::vector<at::Tensor>& operands;
  std::optional<size_t> written;  // index into operands
  Linearity linearity;
};

// The operands where the cheapest ways have them; what is written stays where it is, and
// the others come there. Plain tensors count as replicated: a plain one that is written
// has the whole value written to it. Collective over the mesh dimensions that must move.
// Throws ValueError for operands on different meshes or plain tensors beside a registry
// entry, NotImplementedError for an in-place write that a Partial cannot take.
// REQUIRES: a DTensor.
PointwisePlan plan_pointwise(const PointwiseProblem& problem);

// Runs the operator on the local operands and finishes the call: written operands come
// back as they are, other results lie as the plan says.
void run_pointwise(OperatorCall& call, const PointwiseOperands& operands, PointwisePlan plan);

}  // namespace fsdp::internal
