#include "optim/internal/owners.h"

#include <algorithm>
#include <numeric>

namespace fsdp::internal {

double newton_schulz_cost(const Matrices& matrices) {
  const auto shorter = static_cast<double>(std::min(matrices.rows, matrices.columns));
  const auto longer = static_cast<double>(std::max(matrices.rows, matrices.columns));
  return static_cast<double>(matrices.count) * shorter * shorter * (2 * longer + shorter);
}

std::vector<int64_t> Owners::assign(const std::vector<double>& costs) {
  std::vector<size_t> order(costs.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return costs[a] > costs[b]; });
  std::vector<int64_t> owners(costs.size(), 0);
  for (const size_t each : order) {
    const auto least = std::min_element(loads_.begin(), loads_.end());
    owners[each] = least - loads_.begin();
    *least += costs[each];
  }
  return owners;
}

}  // namespace fsdp::internal
