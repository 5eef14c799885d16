// Which way an operator goes along one mesh dimension: the one for which the fewest bytes
// move. It depends on nothing but what all ranks know alike, so they agree without a
// word.
//
//   from \ to     Shard(b)   Replicate   Partial
//   Shard(a)      1/parts    1           1          a == b: nothing
//   Replicate     0          -           0
//   Partial       1          2           2          the same Partial: nothing
#pragma once

#include "dtensor/strategy/way.h"

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
int64_t move_cost(const Placement& from, const Placement& to, int64_t bytes, int64_t parts);

// The cheapest of `ways`; of equally cheap ones the first. Only ways along which some
// operand that is not replicated may stay as it is count, so nothing is cut that came
// whole. Null when there is none, or running replicated is cheaper.
const Way* choose_way(const std::vector<Way>& ways, const std::vector<Arrival>& operands,
                      int64_t parts);

}  // namespace fsdp::internal
