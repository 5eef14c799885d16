#include "dtensor/strategy/viewed_cut.h"

#include "dtensor/layout/shard_layout.h"

#include <functional>
#include <numeric>

namespace fsdp::internal {
namespace {

using Sizes = std::vector<int64_t>;

int64_t product(Sizes::const_iterator begin, Sizes::const_iterator end) {
  return std::accumulate(begin, end, int64_t{1}, std::multiplies<>());
}

// A cut of the tensor as a row of elements: `outer` times `atoms` of `unit` elements, the
// atoms as large as the chunks allow, which any other description of the cut divides.
struct FlatCut {
  int64_t outer = 1, atoms = 1, unit = 1;
};

FlatCut flat_cut(const Sizes& shape, const Shard& cut, int64_t ranks) {
  const auto dim = shape.begin() + cut.dim;
  const int64_t atoms = atoms_of(cut, *dim);
  const int64_t together = std::gcd(chunk_capacity(atoms, ranks), atoms);
  return {.outer = product(shape.begin(), dim) * cut.outer,
          .atoms = atoms / together,
          .unit = together * cut.unit * product(dim + 1, shape.end())};
}

// The same as a cut of dimension `dim` of `after`.
std::optional<Shard> cut_along(const Sizes& after, Sizes::const_iterator dim, const FlatCut& flat) {
  const int64_t left = product(after.begin(), dim), right = product(dim + 1, after.end());
  if (flat.outer % left != 0 || flat.unit % right != 0) return std::nullopt;
  const Shard cut = {
      .dim = dim - after.begin(), .outer = flat.outer / left, .unit = flat.unit / right};
  if (cut.outer * flat.atoms * cut.unit != *dim) return std::nullopt;
  return cut;
}

// Of a dimension that the view leaves as it is, whose units are the same there.
std::optional<Shard> viewed_ragged(const Sizes& before, const Sizes& after, Shard cut) {
  const auto dim = before.begin() + cut.dim;
  const int64_t left = product(before.begin(), dim);
  for (auto same = after.begin(); same != after.end(); ++same) {
    if (*same != *dim || product(after.begin(), same) != left) continue;
    cut.dim = same - after.begin();
    return cut;
  }
  return std::nullopt;
}

}  // namespace

std::optional<Shard> viewed_cut(const Sizes& before, const Sizes& after, const Shard& cut,
                                int64_t ranks) {
  if (after.empty()) return std::nullopt;
  if (product(before.begin(), before.end()) == 0) return Shard{0};
  if (cut.local_units.has_value()) return viewed_ragged(before, after, cut);
  const auto flat = flat_cut(before, cut, ranks);
  std::optional<Shard> found;
  for (auto dim = after.begin(); dim != after.end(); ++dim) {
    // One atom is the first rank's, and so is every dimension whole that is one atom.
    const auto viewed = flat.atoms == 1 && !found
                            ? std::optional(Shard{.dim = dim - after.begin(), .unit = *dim})
                            : cut_along(after, dim, flat);
    if (!viewed) continue;
    const Shard simple = simplest(*viewed, *dim, ranks);
    if (!Placement(simple).is_interleaved()) return simple;
    if (!found) found = simple;
  }
  return found;
}

}  // namespace fsdp::internal
