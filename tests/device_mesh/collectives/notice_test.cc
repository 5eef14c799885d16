#include "device_mesh/collectives/notice.h"

#include "device_mesh/collectives/stamp.h"

#include <gtest/gtest.h>

#include <string>

namespace fsdp::internal {
namespace {

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
