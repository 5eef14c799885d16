#include "examples/planning/links.h"

#include <gtest/gtest.h>

namespace examples {
namespace {

// By brute force: the ranks of every group of the dimension.
Link slowest_link(const std::vector<int64_t>& shape, size_t dim, int64_t per_node) {
  int64_t stride = 1, ranks = 1;
  for (size_t d = 0; d < shape.size(); ++d) {
    ranks *= shape[d];
    if (d > dim) stride *= shape[d];
  }
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const int64_t first = rank - rank / stride % shape[dim] * stride;
    if (first / per_node != rank / per_node) return Link::kBetweenNodes;
  }
  return Link::kWithinNode;
}

TEST(Links, AreWithinANodeWhereAllGroupsAre) {
  const std::vector<int64_t> sizes = {1, 2, 3, 4, 6, 8, 16};
  for (const int64_t a : sizes) {
    for (const int64_t b : sizes) {
      for (const int64_t c : sizes) {
        for (const int64_t per_node : {1, 2, 4, 6, 8}) {
          if (a * b * c % per_node != 0) continue;  // nodes are full
          for (size_t dim = 0; dim < 3; ++dim) {
            const std::vector<int64_t> shape = {a, b, c};
            if (shape[dim] == 1) continue;
            EXPECT_EQ(link_of(shape, dim, per_node), slowest_link(shape, dim, per_node))
                << a << " x " << b << " x " << c << ", dim " << dim << ", " << per_node;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace examples
