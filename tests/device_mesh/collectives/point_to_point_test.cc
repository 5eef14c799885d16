#include "device_mesh/collectives/backend/c10d_collectives.h"
#include "device_mesh/process_group.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>

namespace fsdp::internal {
namespace {

using testing::run_ranks;

TEST(PointToPoint, MovesUnequalSizesAroundARing) {
  for (int64_t world : {2, 3}) {
    run_ranks(world, [&](int64_t rank) {
      const auto group = default_process_group();
      const auto from = (rank + world - 1) % world;
      auto received = at::empty({from + 1}, at::kLong);
      auto receiving = receive(group, received, from, 7);
      auto sending = send(group, at::full({rank + 1}, rank, at::kLong), (rank + 1) % world, 7);
      receiving.wait("ring");
      sending.wait("ring");
      EXPECT_TRUE(at::equal(received, at::full({from + 1}, from, at::kLong)));
    });
  }
}

TEST(PointToPoint, MessagesOfDifferentTagsNeverMeetWhateverTheirSizes) {
  run_ranks(2, [](int64_t rank) {
    const auto group = default_process_group();
    const auto other = 1 - rank;
    // What rank 0 sends with tag 11 is larger than what rank 1 expects with tag 12.
    auto orphan = at::empty({3 + 5 * other}, at::kByte);
    auto never = receive(group, orphan, other, rank == 0 ? 11 : 12);
    auto unread = send(group, at::full({3 + 5 * rank}, 1, at::kByte), other, rank == 0 ? 11 : 12);
    auto received = at::empty({4}, at::kByte);
    auto receiving = receive(group, received, other, 13);
    auto sending = send(group, at::full({4}, rank, at::kByte), other, 13);
    receiving.wait("later message");
    sending.wait("later message");
    EXPECT_TRUE(at::equal(received, at::full({4}, other, at::kByte)));
    abandon(group, never, std::make_shared<at::Tensor>(orphan));
    abandon(group, unread, nullptr);
    EXPECT_FALSE(never.in_flight());
    barrier(group);
  });
}

TEST(PointToPoint, TagsFollowTheHistoryAndNeverAreThatOfNotices) {
  IssueOrder order;
  for (int i = 0; i < 1000; ++i) {
    const auto tag = tag_of(order.next(1, CollectiveKind::kAllGather, 64));
    EXPECT_GT(tag, kNoticeTag);
  }
  IssueOrder a, b;
  EXPECT_NE(tag_of(a.next(1, CollectiveKind::kAllGather, 64)),
            tag_of(b.next(1, CollectiveKind::kAllGather, 128)));
}

}  // namespace
}  // namespace fsdp::internal
