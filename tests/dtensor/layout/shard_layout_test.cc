#include "dtensor/layout/shard_layout.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/chunk.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace fsdp::internal {
namespace {

TEST(ShardLayout, ChunksAreThoseOfTorchChunk) {
  for (int64_t size = 0; size <= 40; ++size) {
    const at::Tensor whole = at::arange(size);
    for (int64_t parts = 1; parts <= 9; ++parts) {
      const auto chunks = whole.chunk(parts);
      for (int64_t index = 0; index < parts; ++index) {
        const Chunk own = chunk_of(size, parts, index);
        const bool exists = index < static_cast<int64_t>(chunks.size());
        const at::Tensor expected =
            exists ? chunks[static_cast<size_t>(index)] : whole.narrow(0, size, 0);
        EXPECT_TRUE(whole.narrow(0, own.offset, own.length).equal(expected))
            << size << " " << parts << " " << index;
        EXPECT_LE(own.length, chunk_capacity(size, parts));
      }
      EXPECT_EQ(chunk_of(size, parts, 0).length, chunk_capacity(size, parts));
    }
  }
}

TEST(ShardLayout, BoxesOfNestedCutsCoverTheTensorOnce) {
  for (int64_t size = 0; size <= 20; ++size) {
    at::Tensor seen = at::arange(size).zero_();
    for (int64_t outer = 0; outer < 3; ++outer) {
      for (int64_t inner = 0; inner < 2; ++inner) {
        const auto box = local_boxes({size}, {3, 2}, {Shard{0}, Shard{0}}, {outer, inner})[0].box;
        seen.narrow(0, box[0].offset, box[0].length).add_(1);
      }
    }
    EXPECT_TRUE(seen.eq(1).all().item<bool>()) << size;
  }
}

// All meshes of two dimensions and up to eight ranks, all tensors of up to 40 elements
// whose atoms one dimension keeps together, and the other cuts.
TEST(ShardLayout, BoxesOfAtomsCoverTheTensorOnce) {
  for (int64_t outer_ranks = 1; outer_ranks <= 8; ++outer_ranks) {
    for (int64_t inner_ranks = 1; outer_ranks * inner_ranks <= 8; ++inner_ranks) {
      for (int64_t unit = 1; unit <= 5; ++unit) {
        for (int64_t size = 0; size < 40; size += unit) {
          std::vector<int> seen(static_cast<size_t>(size), 0);
          const std::vector<Placement> cuts = {Shard{0, 1, unit}, Shard{0}};
          for (int64_t rank = 0; rank < outer_ranks * inner_ranks; ++rank) {
            const std::vector<int64_t> mesh = {outer_ranks, inner_ranks};
            const std::vector<int64_t> coordinate = {rank / inner_ranks, rank % inner_ranks};
            const auto box = local_boxes({size}, mesh, cuts, coordinate)[0].box;
            EXPECT_EQ(box[0].length, local_shape({size}, mesh, cuts, coordinate)[0]);
            for (int64_t i = 0; i < box[0].length; ++i)
              ++seen[static_cast<size_t>(box[0].offset + i)];
          }
          EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), size)
              << outer_ranks << " x " << inner_ranks << " ranks, unit " << unit;
        }
      }
    }
  }
}

}  // namespace
}  // namespace fsdp::internal
