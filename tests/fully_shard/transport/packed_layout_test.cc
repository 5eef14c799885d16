#include "fully_shard/transport/packed_layout.h"

#include <gtest/gtest.h>

namespace fsdp::internal {
namespace {

TEST(PackedLayout, ChunksTileEveryParameterInRankOrder) {
  for (int64_t rows = 0; rows <= 20; ++rows) {
    for (int64_t world = 1; world <= 9; ++world) {
      const PackedLayout layout({{3, 4}, {rows, 12}, {5, 8}}, world);
      const auto& chunk = layout.chunk(1);
      int64_t covered = 0;
      for (int64_t rank = 0; rank < world; ++rank) {
        EXPECT_EQ(chunk.first(rank), covered);
        EXPECT_EQ(chunk.length(rank) % 12, 0);
        EXPECT_LE(chunk.length(rank), chunk.capacity_bytes);
        covered += chunk.length(rank);
      }
      EXPECT_EQ(covered, rows * 12);
    }
  }
}

TEST(PackedLayout, ChunksAreAlignedAndDoNotOverlap) {
  const PackedLayout layout({{3, 4}, {0, 4}, {7, 100}, {1, 1}}, 3);
  int64_t end = 0;
  for (int64_t i = 0; i < layout.size(); ++i) {
    EXPECT_EQ(layout.chunk(i).offset % kAlignment, 0);
    EXPECT_GE(layout.chunk(i).offset, end);
    end = layout.chunk(i).offset + layout.chunk(i).capacity_bytes;
  }
  EXPECT_GE(layout.row_bytes(), end);
  EXPECT_EQ(layout.row_bytes() % kAlignment, 0);
}

}  // namespace
}  // namespace fsdp::internal
