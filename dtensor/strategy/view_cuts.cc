#include "dtensor/strategy/view_cuts.h"

#include "dtensor/layout/shard_layout.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
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

// How many elements before `position` a rank has whose chunk of each block's atoms is
// `own`.
int64_t own_before(const Shard& cut, int64_t size, const Chunk& own, int64_t position) {
  const int64_t block = std::max<int64_t>(size / cut.outer, 1);
  const int64_t unit = atom_size(cut, size), length = own.length * unit;
  const int64_t within = position % block - own.offset * unit;
  return position / block * length + std::clamp<int64_t>(within, 0, length);
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

std::optional<Shard> cut_of_range(const Shard& cut, int64_t size, const Range& range,
                                  int64_t ranks) {
  if (range.length == 0) return Shard{cut.dim};
  if (range.length == size) return cut;
  if (cut.local_units.has_value()) return std::nullopt;
  const int64_t block = size / cut.outer;
  if (range.start % block != 0 || range.length % block != 0) return std::nullopt;
  return simplest({.dim = cut.dim, .outer = range.length / block, .unit = cut.unit}, range.length,
                  ranks);
}

std::optional<Shard> cut_around_range(const Shard& part, int64_t size, const Range& range,
                                      int64_t ranks) {
  if (range.length == 0) return std::nullopt;
  if (part.local_units.has_value())
    return range.length == size ? std::optional(part) : std::nullopt;
  const int64_t block = range.length / part.outer;
  if (size % block != 0 || range.start % block != 0) return std::nullopt;
  return simplest({.dim = part.dim, .outer = size / block, .unit = part.unit}, size, ranks);
}

Range local_range(const TensorLayout& layout, const std::vector<int64_t>& coordinate, int64_t dim,
                  const Range& range) {
  const int64_t size = layout.shape()[static_cast<size_t>(dim)];
  if (range.length == 0) return {};
  if (range.length == size)
    return {.start = 0, .length = layout.local_shape(coordinate)[static_cast<size_t>(dim)]};
  for (size_t m = 0; m < coordinate.size(); ++m) {
    if (!layout.placements()[m].is_shard(dim) || layout.mesh_shape()[m] == 1) continue;
    const Shard& cut = layout.placements()[m].shard();
    const Chunk own = own_atoms(cut, size, layout.mesh_shape()[m], coordinate[m]);
    const int64_t start = own_before(cut, size, own, range.start);
    return {.start = start,
            .length = own_before(cut, size, own, range.start + range.length) - start};
  }
  return range;
}

std::optional<Range> sliced_range(const OpSchema& call) {
  const Operand& self = call.operands[0];
  const int64_t size = self.size(wrapped_dim(call.number(1), self.ndim()));
  const auto position = [&](size_t place, int64_t otherwise) {
    const auto* const given = std::get_if<int64_t>(&call.plain[place]);
    if (given == nullptr) return otherwise;
    return std::clamp<int64_t>(*given < 0 ? *given + size : *given, 0, size);
  };
  const int64_t start = position(2, 0);
  const int64_t end = std::max(position(3, size), start);
  if (call.number(4) != 1 && end - start > 1) return std::nullopt;
  return Range{.start = start, .length = end - start};
}

}  // namespace fsdp::internal
