#include "device_mesh/collectives/stamp.h"

#include <gtest/gtest.h>

namespace fsdp::internal {
namespace {

TEST(IssueOrder, SameSequencesGiveSameStampsAndOthersDiffer) {
  IssueOrder a, b;
  EXPECT_EQ(a.next(1, CollectiveKind::kAllGather, 64), b.next(1, CollectiveKind::kAllGather, 64));
  const auto first = a.next(2, CollectiveKind::kAllGather, 64);
  const auto second = b.next(3, CollectiveKind::kAllGather, 64);
  EXPECT_NE(first, second);
  EXPECT_EQ(first.unit, 2u);
  EXPECT_EQ(first.kind(), CollectiveKind::kAllGather);
  EXPECT_EQ(first.sequence(), 2u);
  // What went wrong once shows for ever.
  EXPECT_NE(a.next(4, CollectiveKind::kReduceScatter, 64),
            b.next(4, CollectiveKind::kReduceScatter, 64));
}

TEST(IssueOrder, SizeAndKindArePartOfTheHistory) {
  IssueOrder a, b, c;
  const auto stamp = a.next(1, CollectiveKind::kAllGather, 64);
  EXPECT_NE(stamp.history, b.next(1, CollectiveKind::kAllGather, 65).history);
  EXPECT_NE(stamp.history, c.next(1, CollectiveKind::kAllReduce, 64).history);
}

}  // namespace
}  // namespace fsdp::internal
