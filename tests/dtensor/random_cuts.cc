#include "tests/dtensor/random_cuts.h"

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

Placement random_blocks(int64_t dim, int64_t size, std::mt19937& random) {
  const int64_t outer = random_divisor(size, random);
  const int64_t unit = random_divisor(size / outer, random);
  return Shard{.dim = dim, .outer = outer, .unit = unit};
}

// Each unit on a rank of its own choice, or all on one.
Placement random_units(int64_t dim, int64_t size, int64_t ranks, std::mt19937& random) {
  const auto some_rank = [&] { return random() % static_cast<size_t>(ranks); };
  if (random() % 3 == 0) return Placement(Owned{static_cast<int64_t>(some_rank())}).along(dim);
  std::vector<int64_t> units(static_cast<size_t>(ranks), 0);
  for (int64_t i = random_divisor(size, random); i > 0; --i) ++units[some_rank()];
  return RaggedShard{.dim = dim, .local_units = units};
}

}  // namespace

std::vector<Placement> with_random_cuts(std::vector<Placement> placements,
                                        const std::vector<int64_t>& shape,
                                        const std::vector<int64_t>& mesh_shape,
                                        std::mt19937& random) {
  std::vector<bool> is_cut(shape.size());
  for (size_t m = 0; m < placements.size(); ++m) {
    Placement& placement = placements[m];
    if (!placement.is_shard()) continue;
    const int64_t cut_dim = placement.shard_dim();
    const auto dim = static_cast<size_t>(cut_dim);
    if (!is_cut[dim] && shape[dim] > 0 && random() % 3 != 0)
      placement = random() % 2 == 0 ? random_blocks(cut_dim, shape[dim], random)
                                    : random_units(cut_dim, shape[dim], mesh_shape[m], random);
    is_cut[dim] = true;
  }
  return placements;
}

}  // namespace fsdp::testing
