#include "programs/trainer/report/page/step_points.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace programs::run_report {
namespace {

std::vector<StepPoint> points(int64_t count) {
  std::vector<StepPoint> all;
  for (int64_t step = 1; step <= count; ++step) {
    const auto value = static_cast<double>(step);
    all.push_back({step, value, 10 * value, 0.001 * value, 100 * value});
  }
  return all;
}

TEST(StepPoints, AreLeftAloneWhereThereAreFew) {
  EXPECT_TRUE(thinned({}, 10).empty());
  for (const int64_t count : {1, 9, 10})
    EXPECT_EQ(thinned(points(count), 10).size(), static_cast<size_t>(count));
}

TEST(StepPoints, AreMeansOfNeighboursWhereThereAreMany) {
  for (const int64_t count : {11, 19, 20, 21, 1000, 1001}) {
    const auto thin = thinned(points(count), 10);
    EXPECT_LE(thin.size(), 10u) << count;
    EXPECT_GE(thin.size(), 5u) << count;
    EXPECT_EQ(thin.back().step, count);
    EXPECT_EQ(thin.back().peak_bytes, 100.0 * static_cast<double>(count));
  }
  const auto thin = thinned(points(11), 10);
  ASSERT_EQ(thin.size(), 6u);
  EXPECT_EQ(thin[0].step, 2);
  EXPECT_DOUBLE_EQ(thin[0].loss, 1.5);
  EXPECT_DOUBLE_EQ(thin[0].tokens_per_second, 15);
  EXPECT_DOUBLE_EQ(thin[0].waiting, 0.0015);
  EXPECT_EQ(thin[0].peak_bytes, 200);
  EXPECT_DOUBLE_EQ(thin[5].loss, 11);
}

TEST(StepPoints, AreThinnedAsTheyCome) {
  ThinnedPoints thin(10);
  for (const auto& point : points(1000)) {
    thin.add(point);
    EXPECT_LE(thin.points().size(), 10u) << point.step;
    EXPECT_GE(thin.points().size(), std::min<size_t>(static_cast<size_t>(point.step), 6));
    EXPECT_EQ(thin.points().back().step, point.step);
  }
  // Groups of 128, the last one of 104.
  ASSERT_EQ(thin.points().size(), 8u);
  EXPECT_EQ(thin.points()[0].step, 128);
  EXPECT_DOUBLE_EQ(thin.points()[0].loss, 64.5);
  EXPECT_DOUBLE_EQ(thin.points()[0].tokens_per_second, 645);
  EXPECT_DOUBLE_EQ(thin.points()[0].waiting, 0.0645);
  EXPECT_EQ(thin.points()[0].peak_bytes, 12800);
  EXPECT_NEAR(thin.points()[7].loss, 948.5, 1e-9);
}

TEST(StepPoints, AreAllKeptWhereThereAreFew) {
  ThinnedPoints few(10);
  for (const auto& point : points(10)) few.add(point);
  ASSERT_EQ(few.points().size(), 10u);
  EXPECT_EQ(few.points()[9].loss, 10);
}

TEST(StepPoints, HaveAMedian) {
  EXPECT_EQ(median({}), 0);
  EXPECT_EQ(median({3}), 3);
  EXPECT_EQ(median({9, 1, 5}), 5);
  EXPECT_EQ(median({3, 8}), 5.5);
  EXPECT_EQ(median({9, 1, 5, 2}), 3.5);
  EXPECT_EQ(median({7, 7, 1, 1, 1, 1}), 1);
}

}  // namespace
}  // namespace programs::run_report
