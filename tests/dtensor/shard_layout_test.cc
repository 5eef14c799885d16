#include "dtensor/internal/shard_layout.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/chunk.h>
#include <gtest/gtest.h>

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
        const auto box = local_box({size}, {3, 2}, {0, 0}, {outer, inner});
        seen.narrow(0, box[0].offset, box[0].length).add_(1);
      }
    }
    EXPECT_TRUE(seen.eq(1).all().item<bool>()) << size;
  }
}

}  // namespace
}  // namespace fsdp::internal
