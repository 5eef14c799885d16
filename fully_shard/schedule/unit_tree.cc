#include "fully_shard/schedule/unit_tree.h"

#include <algorithm>

namespace fsdp::internal {

void UnitTree::remove(UnitId unit) {
  std::erase_if(parents_, [unit](const auto& item) {
    const auto& [child, parent] = item;
    return child == unit || parent == unit;
  });
}

bool UnitTree::is_ancestor(UnitId ancestor, UnitId unit) const {
  for (auto above = parents_.find(unit); above != parents_.end();
       above = parents_.find(above->second)) {
    if (above->second == ancestor) return true;
  }
  return false;
}

bool UnitTree::has_descendants(UnitId unit) const {
  return std::any_of(parents_.begin(), parents_.end(),
                     [unit](const auto& item) { return item.second == unit; });
}

}  // namespace fsdp::internal
