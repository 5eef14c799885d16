#include "fully_shard/grad_scaler.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

namespace fsdp::internal {
namespace {

// torch.amp's rule, over the whole history again and again.
double expected_scale(const GradScalerOptions& options, const std::vector<bool>& finite) {
  double scale = options.init_scale;
  int64_t in_a_row = 0;
  for (const bool each : finite) {
    in_a_row = each ? in_a_row + 1 : 0;
    if (!each) scale *= options.backoff_factor;
    if (in_a_row == options.growth_interval) {
      scale *= options.growth_factor;
      in_a_row = 0;
    }
  }
  return scale;
}

TEST(LossScale, FollowsEveryHistoryOfTenSteps) {
  for (int64_t interval = 1; interval <= 4; ++interval) {
    const GradScalerOptions options{
        .init_scale = 64, .growth_factor = 3, .backoff_factor = 0.25, .growth_interval = interval};
    for (unsigned history = 0; history < (1U << 10); ++history) {
      LossScale scale(options);
      std::vector<bool> finite;
      for (unsigned step = 0; step < 10; ++step) {
        finite.push_back((history >> step & 1U) != 0);
        finite.back() ? scale.step_was_finite() : scale.step_was_not_finite();
        ASSERT_EQ(scale.value(), expected_scale(options, finite)) << history << " at " << step;
      }
    }
  }
}

TEST(LossScale, StaysAFloatThatCanBeDividedBy) {
  LossScale large({.init_scale = 2e38, .growth_interval = 1});
  large.step_was_finite();
  EXPECT_EQ(large.value(), 2e38);
  LossScale small({.init_scale = 2e-38});
  small.step_was_not_finite();
  EXPECT_EQ(small.value(), 2e-38);
}

TEST(LossScale, RefusesWhatCanNotBeAFactor) {
  for (const auto& options : std::vector<GradScalerOptions>{{.init_scale = 0},
                                                            {.init_scale = -1},
                                                            {.init_scale = 1e39},
                                                            {.growth_factor = 1},
                                                            {.backoff_factor = 1},
                                                            {.backoff_factor = 0},
                                                            {.growth_interval = 0}})
    EXPECT_THROW(LossScale{options}, std::invalid_argument);
  LossScale scale({});
  EXPECT_THROW(scale.set(0, 0), std::invalid_argument);
  EXPECT_THROW(scale.set(1, -1), std::invalid_argument);
  scale.set(8, 1);
  EXPECT_EQ(scale.value(), 8);
  EXPECT_EQ(scale.finite_steps(), 1);
}

}  // namespace
}  // namespace fsdp::internal
