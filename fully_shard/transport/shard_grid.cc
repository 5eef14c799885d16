#include "fully_shard/transport/shard_grid.h"

#include "dtensor/layout/shard_layout.h"

namespace fsdp::internal {
namespace {

// The rows of each place.
std::vector<int64_t> rows_of_places(const ShardExtent& extent, const ShardGrid& grid) {
  std::vector<int64_t> rows;
  for (int64_t inner = 0; inner < grid.inner_ranks; ++inner) {
    const auto atoms = own_atoms(extent.cut, extent.rows, grid.inner_ranks, inner).length;
    const auto shard = atoms * atom_size(extent.cut, extent.rows);
    for (int64_t outer = 0; outer < grid.outer_ranks; ++outer)
      rows.push_back(chunk_of(shard, grid.outer_ranks, outer).length);
  }
  return rows;
}

}  // namespace

std::vector<ShardExtent> cut_over(std::vector<ShardExtent> extents, const ShardGrid& grid) {
  if (!grid.has_pieces()) return extents;
  for (auto& extent : extents) {
    const bool has_rows = extent.rows > 0;  // of none there is nothing to cut
    extent.cut = {
        .dim = extent.cut.dim,
        .local_units = has_rows ? LocalUnits(rows_of_places(extent, grid)) : LocalUnits()};
  }
  return extents;
}

ShardPart place_within(const ChunkOfRank& piece, const ChunkOfRank& shard) {
  const auto& extent = shard.chunk.extent;
  const auto rows_before = piece.chunk.first_row(piece.rank) - shard.chunk.first_row(shard.rank);
  return {.first = rows_before * extent.row_bytes,
          .run_bytes = piece.chunk.rows(piece.rank) * extent.row_bytes,
          .runs = extent.blocks,
          .stride = shard.chunk.rows(shard.rank) * extent.row_bytes};
}

}  // namespace fsdp::internal
