// Strategies for InterleavedShard. An operator does not ask which elements of a dimension
// a rank has, as long as all that is cut alike has the same: so a strategy of plain
// shards is one of interleaved shards, too. No torch here.
#pragma once

#include "dtensor/strategy/op_schema.h"
#include "dtensor/strategy/placement_strategy.h"

#include <vector>

namespace fsdp::internal {

// `strategies`, and each of them once more for every interleaved shard among the
// operands' placements that lets an operand stay as it is. Not where dimensions of
// several lengths are cut, which then do not go together element by element, nor for
// interleaved strategies.
std::vector<PlacementStrategy> with_interleaved_strategies(
    std::vector<PlacementStrategy> strategies, const OpSchema& call);

}  // namespace fsdp::internal
