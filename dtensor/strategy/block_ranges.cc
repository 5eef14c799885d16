#include "dtensor/strategy/block_ranges.h"

#include <algorithm>

namespace fsdp::internal {
namespace {

// How many elements before `position` a rank has whose chunk of each block's atoms is
// `own`.
int64_t own_before(const Shard& cut, int64_t size, const Chunk& own, int64_t position) {
  const int64_t block = std::max<int64_t>(size / cut.outer, 1);
  const int64_t unit = atom_size(cut, size), length = own.length * unit;
  const int64_t within = position % block - own.offset * unit;
  return position / block * length + std::clamp<int64_t>(within, 0, length);
}

}  // namespace

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

}  // namespace fsdp::internal
