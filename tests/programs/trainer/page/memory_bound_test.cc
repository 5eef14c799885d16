#include "programs/trainer/report/page/memory_bound.h"

#include <gtest/gtest.h>

namespace programs::run_report {
namespace {

const UnitFacts kRoot{.name = "(root)", .is_root = true, .bytes = 10, .gradient_bytes = 20};
const UnitFacts kSmall{.name = "small", .bytes = 100, .gradient_bytes = 400};
const UnitFacts kLarge{.name = "large", .bytes = 1000, .gradient_bytes = 800};
const UnitFacts kMiddle{.name = "middle", .bytes = 500, .gradient_bytes = 0};

// docs/design/memory.md, "The bound".
TEST(MemoryBound, IsThatOfTheDocument) {
  const std::vector<UnitFacts> units = {kRoot, kSmall, kLarge, kMiddle};
  EXPECT_EQ(memory_bound(units, {Unsharded::kGathered, 4}), 10 + 20 + 2 * 1000 + 2 * 800 + 800 / 4);
  EXPECT_EQ(memory_bound(units, {Unsharded::kInPlace, 4}), 20 + 2 * 800);
  EXPECT_EQ(unsharded_bound(units), 10 + 1000 + 500);
}

TEST(MemoryBound, AddsGradientsThatWait) {
  const std::vector<UnitFacts> units = {kSmall, kLarge, kRoot};
  for (const auto where : {Unsharded::kGathered, Unsharded::kInPlace}) {
    const auto pending = memory_bound(units, {where, 2, false, true});
    EXPECT_EQ(*pending - *memory_bound(units, {where, 2}), 400 + 800 + 20);
  }
}

TEST(MemoryBound, AddsWhatReplicasAddUp) {
  const std::vector<UnitFacts> units = {kSmall, kLarge, kRoot};
  const auto replicas = memory_bound(units, {Unsharded::kGathered, 4, true});
  EXPECT_EQ(*replicas - *memory_bound(units, {Unsharded::kGathered, 4}), 800 / 4);
  EXPECT_EQ(memory_bound(units, {Unsharded::kGathered, 1, true}), std::nullopt);
}

TEST(MemoryBound, OfARootAloneIsItsOwn) {
  EXPECT_EQ(memory_bound({kRoot}, {Unsharded::kGathered, 2}), 10 + 20 + 20 / 2);
  EXPECT_EQ(memory_bound({kRoot}, {Unsharded::kInPlace, 2}), 20);
  EXPECT_EQ(unsharded_bound({kRoot}), 10);
}

TEST(MemoryBound, OfOneRankIsNothing) {
  EXPECT_EQ(memory_bound({kRoot, kLarge}, {Unsharded::kGathered, 1}), 0);
}

TEST(MemoryBound, OfARootWithoutParameters) {
  EXPECT_EQ(memory_bound({kSmall, kLarge}, {Unsharded::kInPlace, 2}), 2 * 800);
  EXPECT_EQ(unsharded_bound({kLarge}), 1000);
}

}  // namespace
}  // namespace programs::run_report
