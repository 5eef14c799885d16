#include "programs/trainer/report/profiled_steps.h"

#include <gtest/gtest.h>

namespace programs {
namespace {

TEST(ProfiledSteps, AreUpToThreeInTheMiddleAndNotTheFirst) {
  for (int64_t steps = 2; steps <= 1000; ++steps) {
    const auto profiled = profiled_steps(steps, /*as_profile=*/false);
    EXPECT_GE(profiled.first, 2) << steps;
    EXPECT_LE(profiled.last, steps);
    EXPECT_EQ(profiled.last - profiled.first + 1, std::min<int64_t>(3, steps - 1)) << steps;
    if (steps > 4) {
      EXPECT_NEAR(double(profiled.first + profiled.last) / 2, double(steps + 1) / 2, 1) << steps;
    }
  }
}

TEST(ProfiledSteps, AreTheOnlyOne) {
  EXPECT_EQ(profiled_steps(1, false).first, 1);
  EXPECT_EQ(profiled_steps(1, false).last, 1);
}

TEST(ProfiledSteps, AreThoseOfTheProfile) {
  EXPECT_EQ(profiled_steps(300, true).first, 2);
  EXPECT_EQ(profiled_steps(300, true).last, 4);
  EXPECT_EQ(profiled_steps(3, true).last, 3);
}

}  // namespace
}  // namespace programs
