#include "fully_shard/units/planned_owners.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace fsdp::internal {

std::vector<int64_t> planned_owners(const std::vector<int64_t>& sizes, BytesByCoordinate& bytes) {
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
