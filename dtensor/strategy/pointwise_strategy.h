// The strategy of pointwise operators, whose operands are broadcast against each other.
// No torch here.
#pragma once

#include "dtensor/placement.h"
#include "dtensor/strategy/op_schema.h"

#include <cstdint>
#include <vector>

namespace fsdp::internal {

// The cut of `operand` that goes with a cut of the result along `dim`, where the result
// has `ndim` dimensions and `size` elements along that one: along the same dimension
// counted from the end, or none where the operand is repeated along it.
Placement broadcast_along(const Operand& operand, int64_t ndim, int64_t dim, int64_t size);

// Which Partial operands an operator may work on term by term.
enum class Linearity {
  kNone,        // none: reduce first
  kAny,         // every reduction: moves data only (clone, zero_)
  kIdempotent,  // avg, min, max: every term may be set to the result (fill_)
  kUnary,       // sum and avg of the only operand (neg)
  kSum,         // sum and avg of all operands; whole ones become terms (add, sub)
  kScale,  // sum and avg of the first operand when the others are whole (div, masked_fill with zeros)
  kProduct,  // sum and avg of one of the first two operands when the others are whole (mul)
};

// One per dimension of the result, along which operands are cut that are not repeated
// along it, and one per Partial that the operator may work on. None where the shapes do
// not fit: parts of them might.
std::vector<PlacementStrategy> pointwise_strategy(const OpSchema& call, Linearity linearity);

// All operands broadcast together; in memory like the first that is not repeated.
// REQUIRES: the shapes fit.
ResultGeometry pointwise_result(const OpSchema& call);

OpStrategy pointwise(Linearity linearity);

}  // namespace fsdp::internal
