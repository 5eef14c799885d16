#include "device_mesh/collectives/notice.h"

#include <gtest/gtest.h>

#include <string>

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

TEST(Notice, ArrivesAsItWasWritten) {
  IssueOrder order;
  const Notice sent{.stamp = order.next(3, CollectiveKind::kReduceScatter, 64),
                    .words = {.agreement = 0x123456789abcdefull},
                    .global_rank = 5,
                    .operation = "reduce-scatter of unit 'blocks.0'"};
  const auto bytes = write_notice(sent);
  Notice received;
  ASSERT_TRUE(read_notice(bytes.data(), received));
  EXPECT_EQ(received.stamp, sent.stamp);
  EXPECT_EQ(received.words, sent.words);
  EXPECT_EQ(received.global_rank, 5);
  EXPECT_EQ(received.operation, sent.operation);
}

TEST(Notice, LongOperationsAreCutOff) {
  const auto bytes = write_notice({.operation = std::string(1000, 'x')});
  Notice received;
  ASSERT_TRUE(read_notice(bytes.data(), received));
  EXPECT_GT(received.operation.size(), 100u);
  EXPECT_EQ(received.operation, std::string(received.operation.size(), 'x'));
}

TEST(Notice, NothingOfOtherBytesIsBelieved) {
  Notice received;
  NoticeBytes bytes = {};
  EXPECT_FALSE(read_notice(bytes.data(), received)) << "zeros";
  bytes = write_notice({.operation = "all-gather"});
  for (size_t i = 0; i < bytes.size(); ++i) {
    auto damaged = bytes;
    damaged[i] = static_cast<char>(damaged[i] ^ 1);
    EXPECT_FALSE(read_notice(damaged.data(), received)) << "byte " << i;
  }
  EXPECT_EQ(received.operation, "");
}

}  // namespace
}  // namespace fsdp::internal
