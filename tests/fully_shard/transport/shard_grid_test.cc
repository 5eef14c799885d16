// Inner shards and their pieces, against torch.chunk twice.
#include "dtensor/layout/shard_layout.h"
#include "fully_shard/transport/packed_layout.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

namespace fsdp::internal {
namespace {

using Bytes = std::vector<int>;

// One byte per element, all different as far as bytes can be.
Bytes numbered(int64_t size) {
  Bytes bytes(static_cast<size_t>(size));
  std::iota(bytes.begin(), bytes.end(), 0);
  return bytes;
}

Bytes packed(const Bytes& whole, const ShardPart& part) {
  Bytes result;
  part.for_each_run([&](int64_t from, int64_t) {
    result.insert(result.end(), whole.begin() + from, whole.begin() + from + part.run_bytes);
  });
  return result;
}

// Rows [first, first + count) of each of the blocks.
Bytes rows_of(const Bytes& whole, const ShardExtent& extent, int64_t first, int64_t count) {
  Bytes result;
  for (int64_t block = 0; block < extent.blocks; ++block) {
    const auto begin = whole.begin() + (block * extent.rows + first) * extent.row_bytes;
    result.insert(result.end(), begin, begin + count * extent.row_bytes);
  }
  return result;
}

const std::vector<ShardExtent> kExtents = {
    {.rows = 0, .row_bytes = 2},  {.rows = 1, .row_bytes = 3},
    {.rows = 5, .row_bytes = 1},  {.rows = 8, .row_bytes = 2},
    {.rows = 13, .row_bytes = 2}, {.rows = 7, .row_bytes = 2, .blocks = 3, .cut = {.dim = 1}}};

// Calls `check` for every rank of every grid.
void on_grids(const std::function<void(const ShardGrid&)>& check) {
  for (const int64_t inner : {1, 2, 3, 4}) {
    for (const int64_t outer : {1, 2, 3}) {
      for (int64_t rank = 0; rank < inner * outer; ++rank) {
        check({.inner_ranks = inner,
               .inner_rank = rank / outer,
               .outer_ranks = outer,
               .outer_rank = rank % outer});
      }
    }
  }
}

TEST(ShardGrid, PiecesAreChunksOfTheInnerRanksChunks) {
  on_grids([](const ShardGrid& grid) {
    const PackedLayout layout(cut_over(kExtents, grid), grid.count());
    for (size_t i = 0; i < kExtents.size(); ++i) {
      const auto& extent = kExtents[i];
      const auto whole = numbered(extent.nbytes());
      const auto shard = chunk_of(extent.rows, grid.inner_ranks, grid.inner_rank);
      const auto piece = chunk_of(shard.length, grid.outer_ranks, grid.outer_rank);
      const auto& chunk = layout.chunk(static_cast<int64_t>(i));
      EXPECT_EQ(chunk.rows(grid.place()), piece.length);
      EXPECT_EQ(packed(whole, chunk.part(grid.place())),
                rows_of(whole, extent, shard.offset + piece.offset, piece.length));
    }
  });
}

TEST(ShardGrid, ChunksOfAPlaceDoNotOverlapAndFitIntoARow) {
  on_grids([](const ShardGrid& grid) {
    const PackedLayout layout(cut_over(kExtents, grid), grid.count());
    int64_t end = 0;
    for (int64_t i = 0; i < layout.size(); ++i) {
      const auto& chunk = layout.chunk(i);
      EXPECT_GE(chunk.offset_on(grid.place()), end);
      end = chunk.offset_on(grid.place()) + chunk.length(grid.place());
    }
    EXPECT_LE(end, layout.row_bytes());
  });
}

TEST(ShardGrid, PiecesLieWhereTheyAreInTheInnerShard) {
  on_grids([](const ShardGrid& grid) {
    const PackedLayout shards(kExtents, grid.inner_ranks);
    const PackedLayout pieces(cut_over(kExtents, grid), grid.count());
    for (size_t i = 0; i < kExtents.size(); ++i) {
      const auto index = static_cast<int64_t>(i);
      const auto whole = numbered(kExtents[i].nbytes());
      const auto shard = packed(whole, shards.chunk(index).part(grid.inner_rank));
      const auto& piece = pieces.chunk(index);
      const auto within =
          place_within({piece, grid.place()}, {shards.chunk(index), grid.inner_rank});
      EXPECT_EQ(packed(shard, within), packed(whole, piece.part(grid.place())));
    }
  });
}

TEST(ShardGrid, WithoutPiecesNothingIsCutOtherwise) {
  const ShardGrid grid{.inner_ranks = 3, .inner_rank = 1};
  const auto extents = cut_over(kExtents, grid);
  for (size_t i = 0; i < extents.size(); ++i) EXPECT_EQ(extents[i].cut, kExtents[i].cut);
}

}  // namespace
}  // namespace fsdp::internal
