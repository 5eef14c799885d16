// Strategies that the operators which read and write at indices share. No torch here.
#pragma once

#include "dtensor/strategy/op_strategy.h"

#include <cstdint>
#include <vector>

namespace fsdp::internal {

// All operands cut alike along each dimension but `dim` in which they are equally long.
std::vector<PlacementStrategy> equal_dims_strategy(const OpSchema& call, int64_t dim);

// A result as operand 0.
std::vector<ResultGeometry> results_as_self(const OpSchema& call);

}  // namespace fsdp::internal
