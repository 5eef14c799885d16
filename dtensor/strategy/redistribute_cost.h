// The cost of redistributing operands along one mesh dimension, in bytes that move, and
// the placement strategy for which it is least. Both depend on nothing but what all ranks
// know alike, so they choose alike without a message.
//
//   from \ to     Shard(b)   Replicate   Partial
//   Shard(a)      1/parts    1           1          a == b: nothing
//   Replicate     0          -           0
//   Partial       1          2           2          the same Partial: nothing
#pragma once

#include "dtensor/strategy/placement_strategy.h"

#include <cstdint>
#include <vector>

namespace fsdp::internal {

// What one operand brings along one mesh dimension.
struct Arrival {
  Placement placement = Replicate{};
  int64_t bytes = 0;  // of the whole tensor
};

// Bytes that a tensor of `bytes` costs to move, times `parts`, the ranks of the mesh
// dimension: a whole number. Nothing where there is one part.
int64_t redistribute_cost(const Placement& from, const Placement& to, int64_t bytes, int64_t parts);

// The cheapest of `strategies`, the first of equally cheap ones. Only those count that
// let an operand which is not replicated stay as it is: nothing is cut that came whole.
// Null where there is none, or where running replicated is cheaper.
const PlacementStrategy* cheapest_strategy(const std::vector<PlacementStrategy>& strategies,
                                           const std::vector<Arrival>& operands, int64_t parts);

}  // namespace fsdp::internal
