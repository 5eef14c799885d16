#include "tests/dtensor/random_blocks.h"

#include <algorithm>

namespace fsdp::testing {
namespace {

int64_t random_divisor(int64_t number, std::mt19937& random) {
  std::vector<int64_t> divisors;
  for (int64_t d = 1; d <= number; ++d) {
    if (number % d == 0) divisors.push_back(d);
  }
  return divisors[random() % divisors.size()];
}

}  // namespace

std::vector<Placement> with_random_blocks(std::vector<Placement> placements,
                                          const std::vector<int64_t>& shape, std::mt19937& random) {
  std::vector<bool> is_cut(shape.size());
  for (Placement& placement : placements) {
    if (!placement.is_shard()) continue;
    const auto dim = static_cast<size_t>(placement.shard_dim());
    if (!is_cut[dim] && shape[dim] > 0 && random() % 2 == 0) {
      const int64_t outer = random_divisor(shape[dim], random);
      const int64_t unit = random_divisor(shape[dim] / outer, random);
      placement = Shard{.dim = placement.shard_dim(), .outer = outer, .unit = unit};
    }
    is_cut[dim] = true;
  }
  return placements;
}

}  // namespace fsdp::testing
