#include "programs/trainer/report/step_history.h"

#include <gtest/gtest.h>

namespace programs {
namespace {

// After step `step` of 2 s each, in which the rank waits and computes so long.
RankMetrics after(int64_t step, double waiting, double computing) {
  const auto steps = static_cast<double>(step);
  return {.loss = 1 / steps,
          .training_seconds = 2 * steps,
          .waiting_seconds = waiting * steps,
          .computing_seconds = computing * steps,
          .step_peak_bytes = 1000 * waiting};
}

TEST(StepHistory, HasEachStepByItself) {
  StepHistory history(/*tokens_per_step=*/100);
  for (int64_t step = 1; step <= 3; ++step)
    history.add(10 + step, {after(step, 0.5, 1.5), after(step, 1, 1)});
  ASSERT_EQ(history.points().size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    const auto& point = history.points()[i];
    EXPECT_EQ(point.step, 11 + static_cast<int64_t>(i));
    EXPECT_DOUBLE_EQ(point.loss, 1.0 / static_cast<double>(i + 1));
    EXPECT_DOUBLE_EQ(point.tokens_per_second, 50);
    EXPECT_DOUBLE_EQ(point.waiting, 0.375);
    EXPECT_DOUBLE_EQ(point.peak_bytes, 1000);
  }
  EXPECT_EQ(history.last()[1].waiting_seconds, 3);
}

TEST(StepHistory, KnowsWhatRanksDoOfTenStepsAfterTheFirst) {
  StepHistory history(/*tokens_per_step=*/1);
  std::vector<RankMetrics> now(2);
  // The first step is no measure, and neither is the one in which rank 1 paused.
  for (const double computing : {50.0, 2.0, 2.0, 3.0, 3.0, 100.0, 4.0, 4.0, 2.0, 3.0, 8.0}) {
    EXPECT_TRUE(history.loads().empty());
    now[0].training_seconds += 10;
    now[0].waiting_seconds += 1;
    now[0].computing_seconds += 5;
    now[1].training_seconds += 10;
    now[1].computing_seconds += computing;
    history.add(1, now);
  }
  const auto loads = history.loads();
  ASSERT_EQ(loads.size(), 2u);
  EXPECT_DOUBLE_EQ(loads[0].waiting, 0.1);
  EXPECT_DOUBLE_EQ(loads[0].computing_seconds, 5);
  EXPECT_DOUBLE_EQ(loads[0].slowest, 0.8);
  EXPECT_DOUBLE_EQ(loads[1].waiting, 0);
  EXPECT_DOUBLE_EQ(loads[1].computing_seconds, 3);
  EXPECT_DOUBLE_EQ(loads[1].slowest, 0.2);
}

// Of a run of 5,000 steps, in whose last 1,000 rank 1 is slow.
TEST(StepHistory, KeepsSoManyStepsAndNoMore) {
  StepHistory history(/*tokens_per_step=*/60);
  std::vector<RankMetrics> now(2);
  for (int64_t step = 1; step <= 5000; ++step) {
    const bool is_late = step > 4000;
    for (auto& rank : now) {
      rank.loss = static_cast<double>(step);
      rank.training_seconds += is_late ? 3 : 2;
      rank.waiting_seconds += is_late ? 1.5 : 0.5;
    }
    now[0].computing_seconds += 1;
    now[1].computing_seconds += is_late ? 2 : 0.5;
    history.add(step, now);
  }
  EXPECT_EQ(history.steps(), 5000);
  EXPECT_LE(history.points().size(), run_report::kMostPoints);
  EXPECT_EQ(history.points().back().step, 5000);
  EXPECT_DOUBLE_EQ(history.median_tokens_per_second(), 20);
  EXPECT_DOUBLE_EQ(history.median_waiting(), 0.5);
  const auto loads = history.loads();
  ASSERT_EQ(loads.size(), 2u);
  EXPECT_DOUBLE_EQ(loads[0].slowest, 0);
  EXPECT_NEAR(loads[1].slowest, 1, 1e-9);
  EXPECT_DOUBLE_EQ(loads[1].computing_seconds, 2);
  EXPECT_DOUBLE_EQ(loads[1].waiting, 0.5);
}

}  // namespace
}  // namespace programs
