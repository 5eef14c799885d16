// What operators that read and write at indices have in common. No torch here.
#pragma once

#include "dtensor/strategy/operator_ways.h"

#include <cstdint>
#include <vector>

namespace fsdp::internal {

// All operands cut alike along each dimension but `dim` in which they are equally long.
std::vector<Way> equal_dims_ways(const CallGeometry& call, int64_t dim);

// A result as operand 0.
std::vector<ResultGeometry> results_as_self(const CallGeometry& call);

}  // namespace fsdp::internal
