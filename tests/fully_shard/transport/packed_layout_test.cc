#include "fully_shard/transport/packed_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace fsdp::internal {
namespace {

PackedChunk chunk_of_one(const ShardExtent& extent, int64_t world) {
  return PackedLayout({{3, 4}, extent, {5, 8}}, world).chunk(1);
}

// The bytes of the whole that lie at each byte of a rank's part.
std::vector<int64_t> bytes_of_part(const ShardPart& part) {
  std::vector<int64_t> bytes;
  part.for_each_run([&](int64_t in_whole, int64_t in_part) {
    EXPECT_EQ(in_part, static_cast<int64_t>(bytes.size()));
    for (int64_t i = 0; i < part.run_bytes; ++i) bytes.push_back(in_whole + i);
  });
  return bytes;
}

// The same, index by index as torch.chunk cuts dimension 1 of [blocks, rows, row bytes].
std::vector<int64_t> bytes_of_chunk(const ShardExtent& extent, int64_t world, int64_t rank) {
  const auto capacity = (extent.rows + world - 1) / world;
  std::vector<int64_t> bytes;
  for (int64_t block = 0; block < extent.blocks; ++block) {
    for (int64_t row = 0; row < extent.rows; ++row) {
      if (row < rank * capacity || row >= (rank + 1) * capacity) continue;
      for (int64_t i = 0; i < extent.row_bytes; ++i)
        bytes.push_back((block * extent.rows + row) * extent.row_bytes + i);
    }
  }
  return bytes;
}

// Behind the last byte of a rank's chunks, on an alignment boundary.
int64_t end_of_chunks(const PackedLayout& layout, int64_t rank) {
  int64_t end = 0;
  for (int64_t i = 0; i < layout.size(); ++i) {
    const auto& chunk = layout.chunk(i);
    if (chunk.length(rank) > 0)
      end = std::max(end, align_up(chunk.offset_on(rank) + chunk.length(rank)));
  }
  return end;
}

TEST(PackedLayout, LengthsAreWhereTheChunksOfEachRankEnd) {
  const Shard owned{.dim = 0, .local_units = LocalUnits::of_owner(1)};
  const std::vector<std::vector<ShardExtent>> layouts = {
      {{8, 64}, {4, 64}}, {{5, 100}, {7, 30}}, {{1, 64}},
      {{0, 64}, {2, 64}}, {{8, 64, 1, owned}}, {{8, 64}, {3, 64, 1, owned}}};
  for (const auto& extents : layouts) {
    for (int64_t world = 2; world <= 4; ++world) {
      const PackedLayout layout(extents, world);
      for (int64_t rank = 0; rank < world; ++rank) {
        const auto length = layout.lengths().empty() ? layout.row_bytes()
                                                     : layout.lengths()[static_cast<size_t>(rank)];
        EXPECT_EQ(length, end_of_chunks(layout, rank));
      }
    }
  }
  EXPECT_TRUE(PackedLayout({{8, 64}, {4, 64}}, 4).lengths().empty());
}

TEST(PackedLayout, APartHasTheRowsOfItsChunkOfEveryBlockInOrder) {
  for (int64_t blocks = 0; blocks <= 4; ++blocks) {
    for (int64_t rows = 0; rows <= 9; ++rows) {
      for (int64_t row_bytes = 0; row_bytes <= 3; ++row_bytes) {
        for (int64_t world = 1; world <= 6; ++world) {
          const ShardExtent extent{rows, row_bytes, blocks};
          const auto chunk = chunk_of_one(extent, world);
          for (int64_t rank = 0; rank < world; ++rank) {
            const auto part = chunk.part(rank);
            EXPECT_EQ(bytes_of_part(part), bytes_of_chunk(extent, world, rank));
            EXPECT_EQ(part.nbytes(), chunk.length(rank));
            EXPECT_EQ(chunk.length(rank), blocks * chunk.rows(rank) * row_bytes);
            EXPECT_LE(chunk.length(rank), chunk.capacity_bytes());
            EXPECT_TRUE(part.nbytes() == 0 || part.end() <= extent.nbytes());
          }
        }
      }
    }
  }
}

TEST(PackedLayout, PartsHaveEveryByteOnce) {
  for (int64_t rows = 0; rows <= 20; ++rows) {
    for (int64_t world = 1; world <= 9; ++world) {
      const ShardExtent extent{rows, 12, 3};
      const auto chunk = chunk_of_one(extent, world);
      std::vector<int64_t> all;
      for (int64_t rank = 0; rank < world; ++rank) {
        const auto bytes = bytes_of_part(chunk.part(rank));
        all.insert(all.end(), bytes.begin(), bytes.end());
      }
      std::sort(all.begin(), all.end());
      std::vector<int64_t> expected(static_cast<size_t>(rows * 12 * 3));
      std::iota(expected.begin(), expected.end(), 0);
      EXPECT_EQ(all, expected);
    }
  }
}

TEST(PackedLayout, APartAlongDimensionZeroOrOfASingleRankIsOneRun) {
  for (int64_t rows = 0; rows <= 20; ++rows) {
    for (int64_t world = 1; world <= 9; ++world) {
      const auto chunk = chunk_of_one({rows, 12}, world);
      int64_t covered = 0;
      for (int64_t rank = 0; rank < world; ++rank) {
        EXPECT_EQ(chunk.part(rank).runs, 1);
        EXPECT_EQ(chunk.part(rank).first, covered);
        covered += chunk.length(rank);
      }
      EXPECT_EQ(covered, rows * 12);
    }
    EXPECT_EQ(chunk_of_one({rows, 12, 5}, 1).part(0).runs, 1);
  }
}

TEST(PackedLayout, EvenPartsTakeAsMuchRoomAlongEveryDimension) {
  const std::vector<int64_t> shape{4, 8, 12};
  std::vector<int64_t> sizes;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    ShardExtent extent{shape[dim], 4};
    for (size_t i = 0; i < dim; ++i) extent.blocks *= shape[i];
    for (size_t i = dim + 1; i < shape.size(); ++i) extent.row_bytes *= shape[i];
    sizes.push_back(chunk_of_one(extent, 4).capacity_bytes());
  }
  EXPECT_EQ(sizes, std::vector<int64_t>(3, 4 * 8 * 12));
}

TEST(PackedLayout, ChunksAreAlignedAndDoNotOverlap) {
  const PackedLayout layout({{3, 4}, {0, 4}, {7, 100}, {5, 12, 9}, {1, 1}}, 3);
  int64_t end = 0;
  for (int64_t i = 0; i < layout.size(); ++i) {
    EXPECT_EQ(layout.chunk(i).offset % kAlignment, 0);
    EXPECT_GE(layout.chunk(i).offset, end);
    end = layout.chunk(i).offset + layout.chunk(i).capacity_bytes();
  }
  EXPECT_GE(layout.row_bytes(), end);
  EXPECT_EQ(layout.row_bytes() % kAlignment, 0);
}

// Of ragged cuts each rank's row has what it holds, chunk behind chunk without overlap,
// and in memory of all ranks the parts are the wholes.
TEST(PackedLayout, OfRaggedCutsPacksEachRankByItself) {
  for (int64_t world = 1; world <= 4; ++world) {
    const auto cut_as = [&](const std::vector<int64_t>& units) {
      return Placement(RaggedShard{.dim = 0, .local_units = units}).shard();
    };
    std::vector<int64_t> odd(static_cast<size_t>(world), 1);
    odd[static_cast<size_t>(world / 2)] = 4;
    const ShardExtent even{.rows = 7, .row_bytes = 24};
    const ShardExtent ragged{.rows = (world + 3) * 2, .row_bytes = 40, .cut = cut_as(odd)};
    const ShardExtent owned{.rows = 5, .row_bytes = 16, .cut = Placement(Owned{world - 1}).shard()};
    const PackedLayout layout({even, ragged, owned}, world);
    EXPECT_FALSE(layout.is_even());
    EXPECT_TRUE(layout.chunks_make_wholes());
    int64_t longest = 0;
    for (int64_t rank = 0; rank < world; ++rank) {
      int64_t end = 0;
      for (int64_t i = 0; i < layout.size(); ++i) {
        const auto& chunk = layout.chunk(i);
        EXPECT_EQ(layout.offset(Arrangement::kRow, i, rank), end);
        EXPECT_EQ(end % kAlignment, 0);
        EXPECT_LE(chunk.length(rank), chunk.room(rank));
        end += align_up(chunk.room(rank));
        const auto in_common = layout.offset(Arrangement::kCommon, i, rank);
        if (chunk.length(rank) > 0) {
          EXPECT_EQ(in_common, chunk.whole_offset + chunk.part(rank).first);
        }
        EXPECT_LE(in_common + chunk.length(rank), layout.bytes(Arrangement::kCommon));
      }
      longest = std::max(longest, end);
    }
    EXPECT_EQ(layout.row_bytes(), longest);
    for (int64_t i = 0; i < layout.size(); ++i) {
      const auto& chunk = layout.chunk(i);
      int64_t sum = 0;
      for (int64_t rank = 0; rank < world; ++rank) sum += chunk.length(rank);
      EXPECT_EQ(sum, chunk.extent.nbytes());
      EXPECT_LE(chunk.extent.nbytes(), layout.whole_bytes(i));
      const int64_t next = i + 1 < layout.size() ? layout.chunk(i + 1).whole_offset
                                                 : layout.bytes(Arrangement::kCommon);
      EXPECT_LE(chunk.whole_offset + layout.whole_bytes(i), next);
    }
  }
}

// Atoms of several rows stay whole, and nothing else of the layout changes.
TEST(PackedLayout, OfAtomsHasRoomForTheLargestPart) {
  const PackedLayout layout({{.rows = 12, .row_bytes = 8, .cut = {.unit = 4}}}, 2);
  EXPECT_TRUE(layout.is_even());
  const auto& chunk = layout.chunk(0);
  EXPECT_EQ(chunk.capacity_rows, 8);
  EXPECT_EQ(chunk.rows(0), 8);
  EXPECT_EQ(chunk.first_row(1), 8);
  EXPECT_EQ(chunk.rows(1), 4);
  EXPECT_EQ(layout.row_bytes(), align_up(8 * 8));
}

}  // namespace
}  // namespace fsdp::internal
