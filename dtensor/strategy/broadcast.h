// How an operand that is broadcast lies where the result is cut. No torch here.
#pragma once

#include "dtensor/placement.h"
#include "dtensor/strategy/op_schema.h"

#include <cstdint>

namespace fsdp::internal {

// The cut of `operand` that goes with a cut of the result along `dim`, where the result
// has `ndim` dimensions and `size` elements along that one: along the same dimension
// counted from the end, or none where the operand is repeated along it.
Placement broadcast_along(const Operand& operand, int64_t ndim, int64_t dim, int64_t size);

}  // namespace fsdp::internal
