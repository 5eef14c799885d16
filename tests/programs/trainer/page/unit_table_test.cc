#include "programs/trainer/report/page/unit_table.h"

#include <gtest/gtest.h>

namespace programs::run_report {
namespace {

RankStep step(std::vector<Gather> gathers, std::vector<Span> unsharded) {
  return {.seconds = 10, .gathers = std::move(gathers), .unsharded = std::move(unsharded)};
}

TEST(UnitTable, HasMeansOverStepsAndRanks) {
  UnitTable table({{.name = "a", .bytes = 128}, {.name = "b"}, {.name = "never"}});
  table.add(step({{{"a", 0, 1}, false, true, 64, 0.5}, {{"b", 1, 2}, true, true, 8, 0.25}},
                 {{"a", 0, 5}, {"b", 5, 6}}));
  table.add(step({{{"a", 0, 1}, false, true, 64, 1.5}, {{"b", 1, 2}, true, false, 8, 0}},
                 {{"a", 0, 2}, {"a", 4, 5}}));
  const auto rows = table.rows();
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0].unit.bytes, 128);
  EXPECT_EQ(rows[0].gathers, 1);
  EXPECT_EQ(rows[0].prefetched, 0);
  EXPECT_EQ(rows[0].gathered_bytes, 64);
  EXPECT_EQ(rows[0].exposed_seconds, 1);
  EXPECT_DOUBLE_EQ(rows[0].unsharded_share, 0.4);
  EXPECT_TRUE(rows[0].is_first);
  EXPECT_EQ(rows[1].gathers, 1);
  EXPECT_EQ(rows[1].prefetched, 1);
  EXPECT_EQ(rows[1].unused, 0.5);
  EXPECT_DOUBLE_EQ(rows[1].unsharded_share, 0.05);
  EXPECT_FALSE(rows[1].is_first);
  EXPECT_EQ(rows[2].gathers, 0);
}

TEST(UnitTable, NeedsNoStep) {
  const auto rows = UnitTable({{.name = "a", .bytes = 3}}).rows();
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].unit.bytes, 3);
  EXPECT_EQ(rows[0].gathers, 0);
}

}  // namespace
}  // namespace programs::run_report
