#include "programs/trainer/report/page/rank_step.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace programs::run_report {
namespace {

Range range(RangeKind kind, const std::string& of, double begin, double end, int64_t bytes = 0) {
  return {kind, of, bytes, begin, end};
}

Trace trace(std::vector<Range> ranges) {
  std::stable_sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
    return a.begin < b.begin || (a.begin == b.begin && a.end > b.end);
  });
  return {.ranges = std::move(ranges)};
}

// Step 4 from 100 to 200: a gather when its unit is used, one ahead, and a reduction.
std::vector<Range> step_4() {
  return {range(RangeKind::kStep, "4", 100, 200),
          range(RangeKind::kPhase, "forward", 100, 140),
          range(RangeKind::kGather, "a", 101, 102, 64),
          range(RangeKind::kCopyOut, "a", 102, 106),
          range(RangeKind::kWait, "a", 103, 105),
          range(RangeKind::kPrefetch, "b", 106, 109),
          range(RangeKind::kGather, "b", 107, 108, 32),
          range(RangeKind::kRedistribution, "all-gather over tp", 115, 118, 16),
          range(RangeKind::kReshard, "a", 120, 121),
          range(RangeKind::kCopyOut, "b", 122, 123),
          range(RangeKind::kPhase, "backward", 140, 190),
          range(RangeKind::kReduction, "b", 150, 151, 32),
          range(RangeKind::kWait, "b", 160, 170),
          range(RangeKind::kReduction, "a", 171, 172),
          range(RangeKind::kReshard, "b", 180, 181),
          range(RangeKind::kPhase, "exchange of losses", 190, 198),
          range(RangeKind::kRedistribution, "all-gather over dp", 192, 195, 8)};
}

TEST(StepsOf, TellAStepFromItsBeginning) {
  const auto steps = steps_of(trace(step_4()));
  ASSERT_EQ(steps.size(), 1u);
  const auto& step = steps[0];
  EXPECT_EQ(step.number, 4);
  EXPECT_EQ(step.clock, 100);
  EXPECT_EQ(step.seconds, 100);
  EXPECT_EQ(step.phases,
            (std::vector<Span>{
                {"forward", 0, 40}, {"backward", 40, 90}, {"exchange of losses", 90, 98}}));
  EXPECT_EQ(step.gathers, (std::vector<Gather>{{{"a", 1, 6}, false, true, 64, 2},
                                               {{"b", 7, 23}, true, true, 32, 0}}));
  EXPECT_EQ(step.waits, (std::vector<Span>{{"a", 3, 5}, {"b", 60, 70}}));
  EXPECT_EQ(step.redistributions, (std::vector<Span>{{"all-gather over tp", 15, 18}}));
  EXPECT_EQ(step.unsharded, (std::vector<Span>{{"a", 2, 20}, {"b", 22, 80}}));
}

// HFSDP puts inner shards together before it gathers them.
TEST(StepsOf, AddAnOuterGatherToTheGatherBehindIt) {
  auto ranges = step_4();
  ranges.insert(ranges.end(), {range(RangeKind::kOuterGather, "b", 106.2, 106.4, 1000),
                               range(RangeKind::kWait, "b", 106.5, 107)});
  const auto step = steps_of(trace(ranges)).at(0);
  ASSERT_EQ(step.gathers.size(), 2u);
  EXPECT_EQ(step.gathers[0].bytes, 64);  // of another unit
  EXPECT_EQ(step.gathers[1].bytes, 1032);
  EXPECT_DOUBLE_EQ(step.gathers[1].waited, 0.5);
  EXPECT_EQ(step.reductions, (std::vector<Span>{{"b", 50, 70}, {"a", 71, 90}}));
}

TEST(StepsOf, DoNotTakeAnOuterGathersWaitForThatOfAReduction) {
  const auto steps = steps_of(
      trace({range(RangeKind::kStep, "1", 0, 100), range(RangeKind::kPhase, "backward", 0, 90),
             range(RangeKind::kReduction, "a", 10, 11, 8),
             range(RangeKind::kOuterGather, "a", 20, 21, 4), range(RangeKind::kWait, "a", 30, 35),
             range(RangeKind::kGather, "a", 40, 41, 2), range(RangeKind::kWait, "a", 50, 60)}));
  EXPECT_EQ(steps.at(0).reductions, (std::vector<Span>{{"a", 10, 60}}));
  EXPECT_EQ(steps.at(0).gathers, (std::vector<Gather>{{{"a", 40, 41}, false, true, 6, 5}}));
}

TEST(StepsOf, EndAReductionWhereItsSumWasTaken) {
  // That of "a" nobody waited for: the backward ends it.
  EXPECT_EQ(steps_of(trace(step_4()))[0].reductions,
            (std::vector<Span>{{"b", 50, 70}, {"a", 71, 90}}));
}

TEST(StepsOf, TellGathersThatWereDropped) {
  auto ranges = step_4();
  for (auto& each : ranges) {
    if (each.kind == RangeKind::kCopyOut && each.of == "b") each.of = "c";
  }
  const auto step = steps_of(trace(ranges)).at(0);
  ASSERT_EQ(step.gathers.size(), 2u);
  EXPECT_FALSE(step.gathers[1].is_used);
  EXPECT_EQ(step.gathers[1].end, 80);  // the reshard
  EXPECT_TRUE(step.gathers[0].is_used);
  for (const auto& span : step.unsharded) EXPECT_NE(span.of, "b");
}

TEST(StepsOf, CountsUnitsThatWereUnshardedBefore) {
  const auto steps = steps_of(
      trace({range(RangeKind::kStep, "1", 10, 20), range(RangeKind::kReshard, "kept", 15, 16)}));
  EXPECT_EQ(steps.at(0).unsharded, (std::vector<Span>{{"kept", 0, 5}}));
}

TEST(StepsOf, CutsWhatLastsLongerThanAStep) {
  const auto steps = steps_of(
      trace({range(RangeKind::kStep, "1", 10, 20), range(RangeKind::kStep, "2", 20, 30),
             range(RangeKind::kGather, "a", 12, 13), range(RangeKind::kCopyOut, "a", 13, 14),
             range(RangeKind::kWait, "other", 25, 26), range(RangeKind::kReshard, "a", 28, 29)}));
  ASSERT_EQ(steps.size(), 2u);
  EXPECT_EQ(steps[0].unsharded, (std::vector<Span>{{"a", 3, 10}}));
  EXPECT_EQ(steps[1].unsharded, (std::vector<Span>{{"a", 0, 8}}));
  EXPECT_EQ(steps[0].gathers.size(), 1u);
  EXPECT_TRUE(steps[1].gathers.empty());
  EXPECT_TRUE(steps[0].waits.empty());
  EXPECT_EQ(steps[1].waits.size(), 1u);
}

TEST(StepsOf, LeavesOutWhatIsBetweenSteps) {
  const auto steps = steps_of(
      trace({range(RangeKind::kGather, "a", 1, 2), range(RangeKind::kCopyOut, "a", 2, 3),
             range(RangeKind::kReshard, "a", 4, 5), range(RangeKind::kStep, "1", 10, 20)}));
  EXPECT_TRUE(steps.at(0).gathers.empty());
  EXPECT_TRUE(steps.at(0).unsharded.empty());
  EXPECT_TRUE(steps_of({}).empty());
}

}  // namespace
}  // namespace programs::run_report
