// How the operands of an elementwise operator must lie so that it can run on local
// tensors.
#pragma once

#include "dtensor/internal/dtensor_spec.h"
#include "dtensor/internal/operator_call.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace fsdp::internal {

// Which Partial operands an operator may work on term by term.
enum class Linearity {
  kNone,        // none: reduce first
  kAny,         // every reduction: moves data only (clone, zero_)
  kIdempotent,  // avg, min, max: every term may be set to the result (fill_)
  kUnary,       // sum and avg of the only operand (neg)
  kSum,         // sum and avg when all operands have it (add, sub)
  kScale,       // sum and avg of the first operand when the others are whole (mul, div)
};

struct PointwisePlan {
  DTensorSpecPtr result;  // of the output; the written operand's own for in-place operators
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

// The operands, broadcast against each other, redistributed to where the result lies:
// where the written operand lies, else where the operand with the most shards does.
// Collective over the mesh dimensions that must move. Throws ValueError for operands on
// different meshes or plain tensors of more than one element among DTensors,
// NotImplementedError for an in-place write that a Partial cannot take.
PointwisePlan plan_pointwise(const PointwiseProblem& problem);

// Runs the operator on the local operands and finishes the call: written operands come
// back as they are, other results lie as the plan says.
void run_pointwise(OperatorCall& call, const PointwiseOperands& operands, PointwisePlan plan);

}  // namespace fsdp::internal
