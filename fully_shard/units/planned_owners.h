// Which coordinate owns what a unit's placements leave to it (Owned{}). No torch here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
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
inline std::vector<int64_t> planned_owners(const std::vector<int64_t>& sizes,
                                           BytesByCoordinate& bytes) {
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return sizes[a] > sizes[b]; });
  std::vector<int64_t> owners(sizes.size(), 0);
  for (const size_t each : order) {
    size_t least = 0;
    for (size_t i = 1; i < bytes.in_unit.size(); ++i) {
      if (std::pair(bytes.in_unit[i], bytes.in_owned[i]) <
          std::pair(bytes.in_unit[least], bytes.in_owned[least]))
        least = i;
    }
    owners[each] = static_cast<int64_t>(least);
    bytes.in_unit[least] += sizes[each];
    bytes.in_owned[least] += sizes[each];
  }
  return owners;
}

}  // namespace fsdp::internal
