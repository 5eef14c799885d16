// What is gathered ahead: successors that were learned, explicit lists, the switches.
#include "tests/fully_shard/effects/traffic.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

class PrefetchEffects : public Worlds {};

TEST_P(PrefetchEffects, TheFirstForwardFollowsRegistrationAndTheFirstBackwardGuessesNothing) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    // Not the first one, and not the root, which is registered last but used before the
    // head.
    EXPECT_EQ(decoder.forward().prefetched, kUnits - 2);
    EXPECT_EQ(decoder.backward().prefetched, 0);
  });
}

TEST_P(PrefetchEffects, AStepThatRepeatsHasEveryGatherButTheFirstIssuedAhead) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.step();
    for (int step = 1; step < 4; ++step) {
      const auto forward = decoder.forward(), backward = decoder.backward();
      EXPECT_EQ(forward.prefetched, kUnits - 1) << step;
      EXPECT_EQ(backward.prefetched, kBlocks) << step;
      EXPECT_EQ(forward.unused + backward.unused, 0) << step;
      EXPECT_EQ(counters(mesh).staging_bytes, 0) << step;
      decoder.update();
    }
  });
}

TEST_P(PrefetchEffects, UnshardInBackwardFalseLeavesTheGatherToTheTouch) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.step();
    decoder.block(1).set_unshard_in_backward(false);
    for (int step = 0; step < 2; ++step) {
      EXPECT_EQ(decoder.forward().prefetched, kUnits - 1) << step;
      const auto backward = decoder.backward();
      EXPECT_EQ(backward.all_gathers, kBlocks) << step;
      EXPECT_EQ(backward.prefetched, kBlocks - 1) << step;
      decoder.update();
    }
    for (int64_t i = 0; i < kBlocks; ++i) decoder.block(i).set_unshard_in_backward(false);
    decoder.forward();
    EXPECT_EQ(decoder.backward().prefetched, 0);
    decoder.block(1).set_unshard_in_backward(true);
    decoder.forward();
    EXPECT_EQ(decoder.backward().prefetched, 1);
  });
}

TEST_P(PrefetchEffects, AForwardListReplacesTheSuccessor) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.block(0).set_modules_to_forward_prefetch({decoder.block(2), decoder.block(3)});
    auto& model = *decoder.model;
    torch::NoGradGuard no_grad;
    torch::Tensor x;
    const auto data = make_data(5);
    // Issued by the embedding's touch: itself and block 0.
    EXPECT_EQ(traffic_of(mesh, [&] { x = model.embedding(data.index); }).all_gathers, 2);
    auto traffic = traffic_of(mesh, [&] { x = model.blocks[0](x); });
    EXPECT_EQ(traffic.all_gathers, 2);
    EXPECT_EQ(traffic.prefetched, 2);
    traffic = traffic_of(mesh, [&] { x = model.blocks[1](x); });
    EXPECT_EQ(traffic.all_gathers, 1);
    EXPECT_EQ(traffic.prefetched, 0);
    EXPECT_EQ(traffic_of(mesh, [&] { x = model.blocks[2](x); }).all_gathers, 0);
    EXPECT_EQ(traffic_of(mesh, [&] { x = model.blocks[3](x); }).all_gathers, 1);  // the head's
  });
}

TEST_P(PrefetchEffects, ABackwardListReplacesTheSuccessor) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.head().set_modules_to_backward_prefetch({decoder.block(3), decoder.block(2)});
    decoder.forward();
    const auto backward = decoder.backward();  // the first: nothing is known
    EXPECT_EQ(backward.all_gathers, kBlocks);
    EXPECT_EQ(backward.prefetched, 2);
  });
}

TEST_P(PrefetchEffects, AListedUnitThatIsNotUsedIsDroppedWhenTheKindOfPassChanges) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.step();
    decoder.head().set_modules_to_forward_prefetch({decoder.block(0)});
    EXPECT_EQ(decoder.forward().all_gathers, kUnits + 1);
    EXPECT_GT(counters(mesh).staging_bytes, 0);
    EXPECT_EQ(decoder.backward().unused, 1);
    EXPECT_EQ(counters(mesh).staging_bytes, 0);
    EXPECT_EQ(decoder.unsharded_bytes(), 0);
  });
}

TEST_P(PrefetchEffects, ABranchNotTakenCostsOneUnusedGather) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    auto& model = *decoder.model;
    const auto data = make_data(5);
    const auto run = [&](bool skip) {
      auto x = model.embedding(data.index);
      for (size_t i = 0; i < model.blocks.size(); ++i) {
        if (i != 1 || !skip) x = model.blocks[i](x);
      }
      return model.head(model.norm(x)).sum();
    };
    run(false).backward();
    run(false).backward();
    torch::Tensor loss;
    const auto forward = traffic_of(mesh, [&] { loss = run(true); });
    EXPECT_EQ(forward.all_gathers, kUnits);  // block 1 in vain
    EXPECT_EQ(forward.unused, 1);
    EXPECT_EQ(counters(mesh).staging_bytes, 0);
    loss.backward();
  });
}

INSTANTIATE_WORLDS(PrefetchEffects, 2, 3);

}  // namespace
}  // namespace fsdp::testing
