#include "fully_shard/transport/packed_layout.h"

#include "dtensor/layout/shard_layout.h"

#include <utility>

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

int64_t align_up(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

ShardPart PackedChunk::part(int64_t rank) const {
  const auto run_bytes = rows(rank) * extent.row_bytes;
  const auto block_bytes = extent.rows * extent.row_bytes;
  if (run_bytes == block_bytes) return {0, extent.nbytes(), 1, extent.nbytes()};
  return {first_row(rank) * extent.row_bytes, run_bytes, extent.blocks, block_bytes};
}

PackedLayout::PackedLayout(const std::vector<ShardExtent>& extents, int64_t world,
                           int64_t alignment)
    : world_(world), alignment_(alignment) {
  chunks_.reserve(extents.size());
  for (const auto& extent : extents) {
    auto& chunk = chunks_.emplace_back();
    chunk.extent = extent;
    chunk.capacity_rows = largest_part(extent.cut, extent.rows, world);
    is_even_ = is_even_ && !chunk.has_ragged_rows();
  }
  is_even_ ? pack_evenly() : pack_by_rank();
  find_lengths();
}

void PackedLayout::pack_evenly() {
  for (auto& chunk : chunks_) {
    chunk.offset = row_bytes_;
    chunk.whole_offset = world_ * row_bytes_;
    row_bytes_ += aligned(chunk.capacity_bytes());
  }
  common_bytes_ = world_ * row_bytes_;
}

void PackedLayout::pack_by_rank() {
  std::vector<int64_t> ends(static_cast<size_t>(world_), 0);
  for (size_t i = 0; i < chunks_.size(); ++i) {
    auto& chunk = chunks_[i];
    RaggedChunk by_rank{.bounds = {0}, .offsets = ends};
    for (int64_t rank = 0; rank < world_; ++rank) {
      const auto& cut = chunk.extent.cut;
      const Chunk own = own_atoms(cut, chunk.extent.rows, world_, rank);
      by_rank.bounds.push_back(own.length == 0
                                   ? by_rank.bounds.back()
                                   : (own.offset + own.length) * atom_size(cut, chunk.extent.rows));
    }
    chunk.ragged = std::make_shared<const RaggedChunk>(std::move(by_rank));
    for (int64_t rank = 0; rank < world_; ++rank)
      ends[static_cast<size_t>(rank)] += aligned(chunk.room(rank));
    chunk.whole_offset = common_bytes_;
    common_bytes_ += aligned(whole_bytes(static_cast<int64_t>(i)));
  }
  row_bytes_ = *std::max_element(ends.begin(), ends.end());
}

int64_t PackedLayout::end_of_row(int64_t rank) const {
  for (auto chunk = chunks_.rbegin(); chunk != chunks_.rend(); ++chunk) {
    const auto length = chunk->length(rank);
    if (length > 0) return aligned(chunk->offset_on(rank) + length);
  }
  return 0;
}

void PackedLayout::find_lengths() {
  bool all_are_full = true;
  for (int64_t rank = 0; all_are_full && rank < world_; ++rank)
    all_are_full = end_of_row(rank) == row_bytes_;
  if (all_are_full) return;
  for (int64_t rank = 0; rank < world_; ++rank) lengths_.push_back(end_of_row(rank));
}

int64_t PackedLayout::whole_bytes(int64_t index) const {
  const auto& each = chunk(index);
  return each.has_ragged_rows() ? each.extent.nbytes() : world_ * each.capacity_bytes();
}

bool PackedLayout::chunks_make_wholes() const {
  return std::all_of(chunks_.begin(), chunks_.end(), [](const PackedChunk& chunk) {
    return chunk.extent.blocks <= 1 || chunk.part(0).runs == 1;
  });
}

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
