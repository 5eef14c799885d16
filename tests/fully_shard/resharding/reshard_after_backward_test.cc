// set_reshard_after_backward, seen in all-gathers and bytes.
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

class ReshardAfterBackwardEffects : public Worlds {};

TEST_P(ReshardAfterBackwardEffects, FalseLeavesTheNextForwardOnlyWhatBackwardDidNotTouch) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.root().set_reshard_after_backward(false);
    EXPECT_EQ(decoder.forward().all_gathers, kUnits);
    EXPECT_EQ(decoder.backward().all_gathers, kBlocks);
    for (int micro_batch = 1; micro_batch < 4; ++micro_batch) {
      EXPECT_EQ(decoder.forward().all_gathers, 1) << micro_batch;  // the embedding
      EXPECT_EQ(decoder.backward().all_gathers, kBlocks) << micro_batch;
    }
    decoder.update();  // leaves the copies stale, and so empties them
    EXPECT_EQ(decoder.resident_bytes(), 0);
    EXPECT_EQ(decoder.forward().all_gathers, kUnits);
  });
}

TEST_P(ReshardAfterBackwardEffects, FalseAfterForwardToo) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh, {.reshard_after_forward = false});
    decoder.root().set_reshard_after_backward(false);
    EXPECT_EQ(decoder.forward().all_gathers, kUnits);
    EXPECT_EQ(decoder.backward().all_gathers, 0);
    for (int micro_batch = 1; micro_batch < 4; ++micro_batch) {
      EXPECT_EQ(decoder.forward().all_gathers, 0) << micro_batch;
      EXPECT_EQ(decoder.backward().all_gathers, 0) << micro_batch;
    }
  });
}

TEST_P(ReshardAfterBackwardEffects, FalseOnOneBlockKeepsItAlone) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.block(2).set_reshard_after_backward(false, /*recurse=*/false);
    decoder.forward();
    decoder.backward();
    const auto block = decoder.resident_bytes();
    int64_t bytes = 0;
    for (const auto& parameter : decoder.model->blocks[2]->parameters())
      bytes += 4 * parameter.numel();
    EXPECT_GE(block, bytes);
    EXPECT_LT(block, 2 * bytes);
    EXPECT_EQ(decoder.forward().all_gathers, kUnits - 1);
    EXPECT_EQ(decoder.backward().all_gathers, kBlocks);
    decoder.block(2).set_reshard_after_backward(true);
    decoder.forward();
    decoder.backward();
    EXPECT_EQ(decoder.resident_bytes(), 0);
  });
}

INSTANTIATE_WORLDS(ReshardAfterBackwardEffects, 2, 3);

}  // namespace
}  // namespace fsdp::testing
