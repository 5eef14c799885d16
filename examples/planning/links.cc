#include "examples/planning/links.h"

namespace examples {

Link link_of(const std::vector<int64_t>& mesh_shape, size_t dim, int64_t ranks_per_node) {
  int64_t block = 1;  // ranks from the first of a group to the first of the next one
  for (size_t d = dim; d < mesh_shape.size(); ++d) block *= mesh_shape[d];
  return ranks_per_node % block == 0 ? Link::kWithinNode : Link::kBetweenNodes;
}

}  // namespace examples
