#include "optim/internal/owners.h"

#include "dtensor/layout/shard_layout.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace fsdp::internal {

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

PartsAlong::PartsAlong(const TensorLayout& layout, size_t mesh_dim,
                       const std::vector<int64_t>& coordinate)
    : is_cut_(layout.placements()[mesh_dim].is_shard() && layout.mesh_shape()[mesh_dim] > 1) {
  const auto in_front = static_cast<std::ptrdiff_t>(mesh_dim);
  const auto first = [in_front](const auto& all) {
    return std::decay_t<decltype(all)>(all.begin(), all.begin() + in_front);
  };
  whole_shape_ = local_shape(layout.shape(), first(layout.mesh_shape()), first(layout.placements()),
                             first(coordinate));
  const std::vector<int64_t> row = {layout.mesh_shape()[mesh_dim]};
  const std::vector<Placement> cut = {layout.placements()[mesh_dim]};
  for (int64_t index = 0; index < row[0]; ++index) {
    shapes_.push_back(local_shape(whole_shape_, row, cut, {index}));
    boxes_.push_back(local_boxes(whole_shape_, row, cut, {index}));
  }
}

int64_t PartsAlong::elements_at(int64_t index) const {
  const auto& shape = shape_at(index);
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies());
}

}  // namespace fsdp::internal
