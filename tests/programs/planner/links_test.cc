#include "programs/planner/links.h"

#include <gtest/gtest.h>

namespace programs {
namespace {

// By brute force: the ranks of every group of neighbours along the dimension.
Link slowest_link(const std::vector<int64_t>& shape, size_t dim, int64_t group, int64_t per_node) {
  int64_t stride = 1, ranks = 1;
  for (size_t d = 0; d < shape.size(); ++d) {
    ranks *= shape[d];
    if (d > dim) stride *= shape[d];
  }
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const int64_t first = rank - rank / stride % group * stride;
    if (first / per_node != rank / per_node) return Link::kBetweenNodes;
  }
  return Link::kWithinNode;
}

void compare(const std::vector<int64_t>& shape, int64_t per_node) {
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    for (int64_t group = 2; group <= shape[dim]; ++group) {
      if (shape[dim] % group != 0) continue;
      EXPECT_EQ(link_of(shape, dim, group, per_node), slowest_link(shape, dim, group, per_node))
          << shape[0] << " x " << shape[1] << " x " << shape[2] << ", groups of " << group
          << " along " << dim << ", " << per_node << " a node";
    }
  }
}

TEST(Links, AreWithinANodeWhereAllGroupsAre) {
  const std::vector<int64_t> sizes = {1, 2, 3, 4, 6, 8, 16};
  for (const int64_t a : sizes) {
    for (const int64_t b : sizes) {
      for (const int64_t c : sizes) {
        for (const int64_t per_node : {1, 2, 4, 6, 8}) {
          // Nodes are full, but for a job that does not fill the first.
          if (a * b * c % per_node == 0 || a * b * c < per_node) compare({a, b, c}, per_node);
        }
      }
    }
  }
}

}  // namespace
}  // namespace programs
