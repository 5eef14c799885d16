#include "tests/dtensor/views/local_views.h"

#include <c10/util/accumulate.h>

namespace fsdp::testing {
namespace {

// Which rank has each element, in row-major order.
std::vector<int64_t> owners(const std::vector<int64_t>& shape, const Shard& cut, int64_t ranks) {
  const auto dim = static_cast<size_t>(cut.dim);
  int64_t right = 1;
  for (size_t d = dim + 1; d < shape.size(); ++d) right *= shape[d];
  const int64_t block = shape[dim] / cut.outer, atoms = block / cut.unit;
  const int64_t atoms_per_rank = (atoms + ranks - 1) / ranks;
  std::vector<int64_t> owners(static_cast<size_t>(c10::multiply_integers(shape)));
  for (size_t e = 0; e < owners.size(); ++e)
    owners[e] = static_cast<int64_t>(e) / right % block / cut.unit / atoms_per_rank;
  return owners;
}

}  // namespace

bool some_cut_keeps(const std::vector<int64_t>& before, const Shard& cut,
                    const std::vector<int64_t>& after, int64_t ranks) {
  const auto wanted = owners(before, cut, ranks);
  for (size_t d = 0; d < after.size(); ++d) {
    for (int64_t outer = 1; outer <= after[d]; ++outer) {
      for (int64_t unit = 1; outer * unit <= after[d]; ++unit) {
        if (after[d] % (outer * unit) != 0) continue;
        const Shard candidate{.dim = static_cast<int64_t>(d), .outer = outer, .unit = unit};
        if (owners(after, candidate, ranks) == wanted) return true;
      }
    }
  }
  return false;
}

bool are_whole_blocks(const Shard& cut, int64_t size, int64_t start, int64_t length) {
  const int64_t block = size / cut.outer;
  return length == size || (start % block == 0 && length % block == 0);
}

}  // namespace fsdp::testing
