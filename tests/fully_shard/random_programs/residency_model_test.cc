// The reference model alone: the counts that the rules give for a decoder.
#include "tests/fully_shard/random_programs/residency_model.h"

#include <gtest/gtest.h>

#include <optional>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

using Touch = ResidencyModel::Touch;

// An embedding, four blocks, a head, and a root that holds the last norm.
class Decoder {
 public:
  enum Unit { kRoot, kEmbedding, kBlock0, kBlock1, kBlock2, kBlock3, kHead };

  explicit Decoder(ResidencyModel::Spec root = {}, ResidencyModel::Spec below = {}) {
    root.params = below.params = {{.dtype = 0}};
    model.add_unit(root);
    below.parent = kRoot;
    for (int i = kEmbedding; i <= kHead; ++i) model.add_unit(below);
  }

  int64_t run(const std::vector<int>& order, Touch touch) {
    const auto before = model.needed_gathers().most;
    for (const int unit : order) model.touched(unit, touch);
    return model.needed_gathers().most - before;
  }
  int64_t training() { return run(kForward, Touch::kTraining); }
  int64_t inference() { return run(kForward, Touch::kInference); }
  int64_t backward() {
    const auto gathers = run({kHead, kRoot, kBlock3, kBlock2, kBlock1, kBlock0}, Touch::kBackward);
    model.gradient_arrived(kEmbedding);
    model.backward_ended();
    return gathers;
  }
  std::pair<int64_t, int64_t> step() {
    const auto forward = training();
    return {forward, backward()};
  }

  const std::vector<int> kForward{kEmbedding, kBlock0, kBlock1, kBlock2, kBlock3, kRoot, kHead};
  ResidencyModel model;
};

using Gathers = std::pair<int64_t, int64_t>;

TEST(ResidencyModel, ByDefaultGathersBlocksTwiceAStepAndReducesEachUnitOnce) {
  Decoder decoder;
  EXPECT_EQ(decoder.step(), Gathers(7, 4));
  EXPECT_EQ(decoder.step(), Gathers(7, 4));
  EXPECT_EQ(decoder.model.reductions().least, 14);
  EXPECT_EQ(decoder.model.reductions().most, 14);
  EXPECT_TRUE(decoder.model.resident().empty());
}

TEST(ResidencyModel, KeepsTheRootAfterInference) {
  Decoder decoder;
  decoder.step();
  EXPECT_EQ(decoder.inference(), 7);
  EXPECT_EQ(decoder.inference(), 6);
  EXPECT_EQ(decoder.step(), Gathers(6, 4));
}

TEST(ResidencyModel, KeepsWhatReshardAfterForwardFalseKeeps) {
  Decoder decoder({}, {.reshard_after_forward = false});
  EXPECT_EQ(decoder.step(), Gathers(7, 0));
  EXPECT_EQ(decoder.step(), Gathers(7, 0));
  EXPECT_EQ(decoder.inference(), 7);
  EXPECT_EQ(decoder.inference(), 0);
}

TEST(ResidencyModel, KeepsWhatReshardAfterBackwardFalseKeeps) {
  Decoder decoder({.reshard_after_backward = false}, {.reshard_after_backward = false});
  EXPECT_EQ(decoder.step(), Gathers(7, 4));
  EXPECT_EQ(decoder.step(), Gathers(1, 4));
  for (int unit = Decoder::kRoot; unit <= Decoder::kHead; ++unit) decoder.model.entry_written(unit);
  EXPECT_EQ(decoder.step(), Gathers(7, 4));
}

TEST(ResidencyModel, KeepsWhatWasUnshardedByHandUntilItsTurnIsOver) {
  Decoder decoder;
  for (int unit = Decoder::kRoot; unit <= Decoder::kHead; ++unit)
    decoder.model.unsharded_explicitly(unit);
  EXPECT_EQ(decoder.step(), Gathers(0, 4));
}

TEST(ResidencyModel, KeepsTheLastUnitsOverAnEvaluationBeforeBackward) {
  Decoder decoder;
  EXPECT_EQ(decoder.training(), 7);
  EXPECT_EQ(decoder.inference(), 5);
  EXPECT_EQ(decoder.backward(), 4);
}

TEST(ResidencyModel, ReshardsAnAncestorThatIsToWhenTheNextUnitIsTouched) {
  Decoder decoder({.reshard_after_forward = true});
  EXPECT_EQ(decoder.training(), 7);
  EXPECT_EQ(decoder.model.resident(), (std::set<int>{Decoder::kRoot, Decoder::kHead}));
  EXPECT_EQ(decoder.backward(), 5);
  EXPECT_EQ(decoder.training(), 7);
  EXPECT_EQ(decoder.model.resident(), (std::set<int>{Decoder::kHead}));
  EXPECT_EQ(decoder.backward(), 5);
}

TEST(ResidencyModel, KeepsARecomputedSegmentUntilBackwardWasThere) {
  Decoder decoder;
  decoder.training();
  const auto forward = {Decoder::kBlock0, Decoder::kBlock1, Decoder::kBlock2};
  EXPECT_EQ(decoder.run({Decoder::kHead, Decoder::kRoot, Decoder::kBlock3}, Touch::kBackward), 1);
  EXPECT_EQ(decoder.run({forward.begin(), forward.end()}, Touch::kRecompute), 3);
  EXPECT_EQ(decoder.run({Decoder::kBlock2, Decoder::kBlock1, Decoder::kBlock0}, Touch::kBackward),
            0);
}

TEST(ResidencyModel, KeepsPendingWhatWaitsWithoutSynchronisation) {
  Decoder decoder;
  decoder.model.set_synchronizes(Decoder::kBlock1, false);
  decoder.step();
  EXPECT_EQ(decoder.model.reductions().most, 6);
  decoder.model.set_synchronizes(Decoder::kBlock1, true);
  decoder.run({Decoder::kHead}, Touch::kTraining);
  decoder.run({Decoder::kHead}, Touch::kBackward);
  decoder.model.backward_ended();
  EXPECT_EQ(decoder.model.reductions().least, 8);
  EXPECT_EQ(decoder.model.reductions().most, 8);
}

}  // namespace
}  // namespace fsdp::testing
