#include "programs/trainer/report/page/memory_bound.h"

#include <algorithm>
#include <functional>

namespace programs::run_report {
namespace {

// Of the units below the root, the largest `count`.
int64_t largest(const std::vector<UnitFacts>& units, int64_t UnitFacts::*bytes, size_t count = 1) {
  std::vector<int64_t> sizes(count, 0);
  for (const auto& unit : units) {
    if (!unit.is_root) sizes.push_back(unit.*bytes);
  }
  std::sort(sizes.begin(), sizes.end(), std::greater<>());
  int64_t sum = 0;
  for (size_t i = 0; i < count; ++i) sum += sizes[i];
  return sum;
}

}  // namespace

std::optional<int64_t> memory_bound(const std::vector<UnitFacts>& units, const Sharding& sharding) {
  if (sharding.ranks == 1)  // members borrow the shards
    return sharding.has_replicas ? std::nullopt : std::optional<int64_t>(0);
  int64_t root = 0, root_gradients = 0, all_gradients = 0;
  for (const auto& unit : units) {
    all_gradients += unit.gradient_bytes;
    if (!unit.is_root) continue;
    root = unit.bytes;
    root_gradients = unit.gradient_bytes;
  }
  const int64_t held = root_gradients + (sharding.has_pending_gradients ? all_gradients : 0);
  const int64_t gradients = largest(units, &UnitFacts::gradient_bytes);
  if (sharding.where == Unsharded::kInPlace) return held + 2 * gradients;
  // A part of the row that is on its way, which replicas add up then: the root's, where
  // it is alone.
  const int64_t part = (units.size() == 1 ? root_gradients : gradients) / sharding.ranks;
  return root + held + 2 * largest(units, &UnitFacts::bytes) + 2 * gradients + part +
         (sharding.has_replicas ? part : 0);
}

int64_t unsharded_bound(const std::vector<UnitFacts>& units) {
  int64_t root = 0;
  for (const auto& unit : units) root += unit.is_root ? unit.bytes : 0;
  return root + largest(units, &UnitFacts::bytes, 2);
}

}  // namespace programs::run_report
