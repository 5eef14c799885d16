#include "programs/trainer/report/page/timelines.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace programs::run_report {
namespace {

// Steps of 10 s each, in which the rank waits so long in backward.
Trace trace_of(std::vector<double> waits, int64_t base_nanoseconds = 0) {
  Trace trace{.base_nanoseconds = base_nanoseconds};
  double now = 100;
  for (const double wait : waits) {
    trace.ranges.push_back({RangeKind::kStep, "3", 0, now, now + 10});
    trace.ranges.push_back({RangeKind::kPhase, "backward", 0, now, now + 8});
    trace.ranges.push_back({RangeKind::kGather, "a", 5, now + 1, now + 2});
    trace.ranges.push_back({RangeKind::kWait, "a", 0, now + 2, now + 2 + wait});
    trace.ranges.push_back({RangeKind::kPhase, "exchange of losses", 0, now + 8, now + 10});
    now += 10;
  }
  return trace;
}

std::vector<int64_t> ranks_of(const std::vector<RankTimeline>& timelines) {
  std::vector<int64_t> ranks;
  for (const auto& each : timelines) ranks.push_back(each.rank);
  return ranks;
}

TEST(Timelines, AreThoseOfTheFirstRanksAndOfTheSlowest) {
  Timelines timelines({{.name = "a"}}, /*has_one_clock=*/true);
  for (int64_t rank = 0; rank < 40; ++rank)
    EXPECT_TRUE(timelines.add(rank, trace_of({rank == 20 ? 1.0 : 5.0})));
  EXPECT_EQ(ranks_of(timelines.shown()), (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 20}));
  EXPECT_EQ(timelines.slowest(), 20);
  EXPECT_EQ(timelines.ranks(), 40);
}

TEST(Timelines, AreShownOnce) {
  Timelines timelines({{.name = "a"}}, /*has_one_clock=*/true);
  for (int64_t rank = 0; rank < 40; ++rank) timelines.add(rank, trace_of({rank == 3 ? 1.0 : 5.0}));
  EXPECT_EQ(ranks_of(timelines.shown()), (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(timelines.slowest(), std::nullopt);
}

TEST(Timelines, DoNotCountRedistributionsAsComputing) {
  Timelines timelines({{.name = "a"}}, /*has_one_clock=*/true);
  for (int64_t rank = 0; rank < 40; ++rank) {
    auto trace = trace_of({1});
    const double seconds = rank == 20 ? 1 : 2;
    trace.ranges.push_back(
        {RangeKind::kRedistribution, "all-reduce over tp", 8, 104, 104 + seconds});
    timelines.add(rank, trace);
  }
  EXPECT_EQ(timelines.slowest(), 20);
}

TEST(Timelines, AddUpEveryRanksSteps) {
  Timelines timelines({{.name = "a"}}, /*has_one_clock=*/true);
  for (int64_t rank = 0; rank < 20; ++rank) timelines.add(rank, trace_of({1, 1}));
  ASSERT_EQ(timelines.units().size(), 1u);
  EXPECT_DOUBLE_EQ(timelines.units()[0].gathers, 1);
  EXPECT_DOUBLE_EQ(timelines.units()[0].gathered_bytes, 5);
  EXPECT_DOUBLE_EQ(timelines.mean_step_seconds(), 10);
}

TEST(Timelines, NameWhatIsMissing) {
  Timelines timelines({}, /*has_one_clock=*/true);
  EXPECT_FALSE(timelines.add(0, {}));
  timelines.missing(0, "lost");
  timelines.add(1, trace_of({1}));
  const auto shown = timelines.shown();
  EXPECT_EQ(ranks_of(shown), (std::vector<int64_t>{1, 0}));
  EXPECT_FALSE(shown[1].step);
  EXPECT_EQ(shown[1].missing, "lost");
  EXPECT_EQ(Timelines({}, true).mean_step_seconds(), 0);
}

TEST(Timelines, AreOnOneClockWithinAHost) {
  for (const bool has_one_clock : {true, false}) {
    Timelines timelines({}, has_one_clock);
    timelines.add(0, trace_of({1}, 1'000'000'000));
    timelines.add(1, trace_of({1}, 3'000'000'000));
    const auto shown = timelines.shown();
    EXPECT_DOUBLE_EQ(shown[1].step->clock - shown[0].step->clock, has_one_clock ? 2 : 0);
  }
}

}  // namespace
}  // namespace programs::run_report
