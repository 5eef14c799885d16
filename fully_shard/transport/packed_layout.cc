#include "fully_shard/transport/packed_layout.h"

namespace fsdp::internal {

int64_t align_up(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

ShardPart PackedChunk::part(int64_t rank) const {
  const auto run_bytes = rows(rank) * extent.row_bytes;
  const auto block_bytes = extent.rows * extent.row_bytes;
  if (run_bytes == block_bytes) return {0, extent.nbytes(), 1, extent.nbytes()};
  return {first_row(rank) * extent.row_bytes, run_bytes, extent.blocks, block_bytes};
}

PackedLayout::PackedLayout(const std::vector<ShardExtent>& extents, int64_t world) : world_(world) {
  chunks_.reserve(extents.size());
  for (const auto& extent : extents) {
    chunks_.push_back({row_bytes_, extent, (extent.rows + world - 1) / world});
    row_bytes_ += align_up(chunks_.back().capacity_bytes());
  }
}

bool PackedLayout::chunks_make_wholes() const {
  return std::all_of(chunks_.begin(), chunks_.end(), [](const PackedChunk& chunk) {
    return chunk.extent.blocks <= 1 || chunk.part(0).runs == 1;
  });
}

}  // namespace fsdp::internal
