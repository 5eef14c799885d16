#include "dtensor/internal/block_views.h"

#include "dtensor/ways/viewed_cut.h"

#include <algorithm>

namespace fsdp::internal {
namespace {

// The mesh dimension that cuts `dim`, if it is one.
std::optional<size_t> only_cut_of(const DTensorSpec& spec, int64_t dim) {
  const auto cuts = [dim](const auto& placement) { return placement.is_shard(dim); };
  const auto& placements = spec.placements();
  const auto first = std::find_if(placements.begin(), placements.end(), cuts);
  if (std::count_if(placements.begin(), placements.end(), cuts) != 1) return std::nullopt;
  return static_cast<size_t>(first - placements.begin());
}

std::vector<Placement> with_cut(const DTensorSpec& spec, size_t m, const Shard& cut, int64_t size) {
  auto placements = spec.placements();
  placements[m] = simplest(cut, size, spec.mesh().size(static_cast<int64_t>(m)));
  return placements;
}

// How many elements before `position` a rank has whose chunk of each block's atoms is
// `own`.
int64_t own_before(const Shard& cut, int64_t size, const Chunk& own, int64_t position) {
  const int64_t block = std::max<int64_t>(size / cut.outer, 1);
  const int64_t length = own.length * cut.unit;
  const int64_t within = position % block - own.offset * cut.unit;
  return position / block * length + std::clamp<int64_t>(within, 0, length);
}

}  // namespace

std::optional<std::vector<Placement>> placements_of_range(const DTensorSpec& spec,
                                                          const DimRange& range) {
  const auto m = only_cut_of(spec, range.dim);
  if (!m.has_value()) return std::nullopt;
  const int64_t size = spec.shape()[static_cast<size_t>(range.dim)];
  const auto cut = cut_of_blocks(spec.placements()[*m].shard(), size, range.start, range.length);
  if (!cut.has_value()) return std::nullopt;
  return with_cut(spec, *m, *cut, range.length);
}

DimRange local_range(const DTensorSpec& spec, const DimRange& range) {
  const auto m = *only_cut_of(spec, range.dim);
  const auto mesh_dim = static_cast<int64_t>(m);
  const Shard& cut = spec.placements()[m].shard();
  const int64_t size = spec.shape()[static_cast<size_t>(range.dim)];
  const Chunk own =
      chunk_of(atoms_of(cut, size), spec.mesh().size(mesh_dim), spec.mesh().local_rank(mesh_dim));
  const int64_t start = own_before(cut, size, own, range.start);
  const int64_t end = own_before(cut, size, own, range.start + range.length);
  return {.dim = range.dim, .start = start, .length = end - start};
}

std::optional<std::vector<Placement>> placements_around(const DTensorSpec& part, int64_t size,
                                                        const DimRange& range) {
  const auto m = only_cut_of(part, range.dim);
  if (!m.has_value() || range.length == 0) return std::nullopt;
  const Shard& cut = part.placements()[*m].shard();
  const int64_t block = range.length / cut.outer;
  if (size % block != 0 || range.start % block != 0) return std::nullopt;
  return with_cut(part, *m, {.dim = cut.dim, .outer = size / block, .unit = cut.unit}, size);
}

}  // namespace fsdp::internal
