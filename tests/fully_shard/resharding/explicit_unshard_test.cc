// unshard, unshard_async and reshard by hand, seen in all-gathers and bytes.
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/start_values.h"
#include "tests/support/with_environment.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

class ExplicitUnshardEffects : public Worlds {};

TEST_P(ExplicitUnshardEffects, AWholeModelUnshardedBeforeForwardGathersNothingInIt) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    for (int step = 0; step < 2; ++step) {
      const auto by_hand = traffic_of(mesh, [&] {
        for (auto unit : fsdp_modules(*decoder.model)) unit.unshard();
      });
      EXPECT_EQ(by_hand.all_gathers, kUnits);
      EXPECT_EQ(decoder.forward().all_gathers, 0) << step;
      EXPECT_EQ(decoder.backward().all_gathers, kBlocks) << step;
      EXPECT_EQ(decoder.resident_bytes(), 0);
      decoder.update();
    }
  });
}

TEST_P(ExplicitUnshardEffects, AUnitStaysWhileOthersHaveTheirTurns) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.step();
    for (const int64_t i : {0, 3}) {
      decoder.block(i).unshard();
      EXPECT_EQ(decoder.forward().all_gathers, kUnits - 1) << i;
      EXPECT_EQ(decoder.backward().all_gathers, kBlocks) << i;  // its turn in forward was over
      decoder.update();
    }
  });
}

TEST_P(ExplicitUnshardEffects, BetweenForwardAndBackwardSavesTheGatherInBackward) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.step();
    decoder.forward();
    decoder.block(0).unshard();
    EXPECT_EQ(decoder.backward().all_gathers, kBlocks - 1);
  });
}

TEST_P(ExplicitUnshardEffects, AfterAnEvaluationIsNoLeftoverOfIt) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.step();
    decoder.inference();  // leaves root and head
    decoder.block(1).unshard();
    EXPECT_EQ(decoder.forward().all_gathers, kUnits - 2);  // all but the root and block 1
  });
}

TEST_P(ExplicitUnshardEffects, AsyncIssuesOneGatherHoweverOftenItIsWaitedFor) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.step();
    const auto traffic = traffic_of(mesh, [&] {
      auto handle = decoder.block(2).unshard_async();
      EXPECT_EQ(decoder.resident_bytes(), 0);
      handle.wait();
      EXPECT_GT(decoder.resident_bytes(), 0);
      handle.wait();
    });
    EXPECT_EQ(traffic.all_gathers, 1);
    EXPECT_EQ(decoder.forward().all_gathers, kUnits - 1);
  });
}

TEST_P(ExplicitUnshardEffects, AsyncWaitedForAfterATouchGathersNoMore) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.step();
    auto handle = decoder.block(2).unshard_async();
    torch::NoGradGuard no_grad;
    decoder.model->blocks[2]->up->weight.sum();
    const auto held = decoder.resident_bytes();
    EXPECT_GT(held, 0);
    EXPECT_EQ(traffic_of(mesh, [&] { handle.wait(); }).all_gathers, 0);
    EXPECT_EQ(decoder.resident_bytes(), held);
  });
}

TEST_P(ExplicitUnshardEffects, AsyncNeverWaitedForIsUsedByTheTouch) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.step();
    decoder.block(2).unshard_async();
    EXPECT_EQ(decoder.forward().all_gathers, kUnits - 1);
    EXPECT_EQ(decoder.backward().all_gathers, kBlocks);
    EXPECT_EQ(counters(mesh).staging_bytes, 0);
  });
}

TEST_P(ExplicitUnshardEffects, AsyncNeverUsedLeavesNothingBehind) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder witness(mesh);
    const auto before = counters(mesh);
    {
      MeasuredDecoder decoder(mesh);
      decoder.block(1).unshard_async();
    }
    EXPECT_EQ(counters(mesh).staging_bytes, before.staging_bytes);
    EXPECT_EQ(resident_bytes(counters(mesh)), resident_bytes(before));
    EXPECT_EQ(counters(mesh).sharded_bytes, before.sharded_bytes);
    EXPECT_EQ(witness.step().reduce_scatters, kUnits);
  });
}

TEST_P(ExplicitUnshardEffects, AWriteBeforeTheWaitIsInWhatTheWaitBrings) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    auto& weight = decoder.model->blocks[0]->up->weight;
    auto handle = decoder.block(0).unshard_async();
    {
      torch::NoGradGuard no_grad;
      auto entry = decoder.model->blocks[0]->up->named_parameters()["weight"];
      entry.fill_(0.5);
    }
    handle.wait();
    EXPECT_GT(decoder.resident_bytes(), 0);
    torch::NoGradGuard no_grad;
    EXPECT_TRUE(torch::equal(weight * 2, torch::ones({16, 8})));
  });
}

TEST_P(ExplicitUnshardEffects, ReshardEmptiesAtOnce) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh, {.reshard_after_forward = false});
    decoder.step();
    decoder.forward();
    const auto kept = decoder.resident_bytes();
    decoder.block(1).reshard();
    EXPECT_LT(decoder.resident_bytes(), kept);
    EXPECT_EQ(decoder.backward().all_gathers, 1);
  });
}

INSTANTIATE_WORLDS(ExplicitUnshardEffects, 2, 3);

// Where ranks share memory, they read the others' shards where they lie.
TEST(ExplicitUnshardOverGloo, StagesTheRowsOfAllRanks) {
  const WithEnvironment over_gloo("FSDP_PEER_MEMORY", "off");
  on_ranks_of(2, [](int64_t, const DeviceMesh& mesh) {
    auto layer = make_linear(4, 6);
    auto handle = fully_shard(layer, mesh).unshard_async();
    EXPECT_GT(counters(mesh).staging_bytes, 0);
    handle.wait();
    EXPECT_EQ(counters(mesh).staging_bytes, 0);
  });
}

}  // namespace
}  // namespace fsdp::testing
