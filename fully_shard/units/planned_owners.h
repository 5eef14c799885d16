// Which coordinate owns what a unit's placements leave to it (Owned{}). No torch here.
#pragma once

#include <cstdint>
#include <vector>

namespace fsdp::internal {

// What each coordinate of the dimension that shards has, in bytes.
struct BytesByCoordinate {
  std::vector<int64_t> in_unit;   // of the unit's other parameters
  std::vector<int64_t> in_owned;  // of what the units before were given so
};

// By position in `sizes`, in bytes: the largest goes first, and to the coordinate with
// the least of the unit, so that its longest row is short; of several to the one that was
// given least by all units, then to the first (longest processing time first, as in
// optim/internal/owners.h). Adds what it gives to `bytes`. Ranks that ask alike are
// answered alike.
std::vector<int64_t> planned_owners(const std::vector<int64_t>& sizes, BytesByCoordinate& bytes);

}  // namespace fsdp::internal
