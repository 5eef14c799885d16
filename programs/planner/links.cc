#include "programs/planner/links.h"

#include <functional>
#include <numeric>

namespace programs {

Link link_of(const std::vector<int64_t>& mesh_shape, size_t dim, int64_t group,
             int64_t ranks_per_node) {
  const auto product_from = [&](size_t first) {
    return std::accumulate(mesh_shape.begin() + static_cast<std::ptrdiff_t>(first),
                           mesh_shape.end(), int64_t{1}, std::multiplies<>());
  };
  if (product_from(0) <= ranks_per_node) return Link::kWithinNode;
  // Ranks from the first of a group to the first of the next one.
  const int64_t block = group * product_from(dim + 1);
  return ranks_per_node % block == 0 ? Link::kWithinNode : Link::kBetweenNodes;
}

}  // namespace programs
