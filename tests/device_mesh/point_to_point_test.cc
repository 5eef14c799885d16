#include "device_mesh/collectives/backend/point_to_point.h"

#include "device_mesh/collectives/backend/abandoned.h"
#include "device_mesh/collectives/backend/c10d_collectives.h"
#include "device_mesh/collectives/backend/row_exchange.h"
#include "device_mesh/collectives/slow_wait.h"
#include "device_mesh/process_group.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

namespace fsdp::internal {
namespace {

using ::testing::HasSubstr;
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

TEST(RowExchange, GivesTheSumOfThisRanksRowsWithOneSpareRow) {
  for (int64_t world : {1, 2, 3, 4}) {
    for (const bool in_background : {false, true}) {
      run_ranks(world, [&](int64_t rank) {
        auto rows = at::empty({world, 40}, at::kByte);
        for (int64_t r = 0; r < world; ++r)
          rows[r].view(at::kFloat).copy_(at::arange(10).add(100 * rank + r));
        std::atomic<int> agreed = 0;
        RowExchange exchange(
            default_process_group(), rows, at::kFloat,
            {.what = "sum", .tag = 5, .agree = [&] { ++agreed; }, .in_background = in_background});
        EXPECT_EQ(exchange.staging_bytes(), (world + 1) * 40);
        const auto sum = exchange.wait();
        const auto of_ranks = 100 * world * (world - 1) / 2;
        EXPECT_TRUE(
            at::equal(sum, at::arange(10).add(rank).mul(world).add(of_ranks).to(at::kFloat)));
        EXPECT_EQ(agreed, 1);
      });
    }
  }
}

TEST(RowExchange, WithoutAgreementNothingIsWaitedFor) {
  run_ranks(3, [](int64_t rank) {
    const auto begin = std::chrono::steady_clock::now();
    RowExchange exchange(default_process_group(), at::zeros({3, 40 + 8 * rank}, at::kByte),
                         at::kFloat,
                         {.what = "sum",
                          .tag = 5 + static_cast<int>(rank),
                          .agree = [] { throw std::runtime_error("no agreement"); },
                          .in_background = true});
    EXPECT_THROW(exchange.wait(), std::runtime_error);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  });
}

TEST(SlowWait, TellsOnceWhichOperationAndForWhom) {
  set_slow_wait_threshold(std::chrono::milliseconds(200));
  ::testing::internal::CaptureStderr();
  run_ranks(2, [](int64_t rank) {
    const auto group = default_process_group();
    auto received = at::empty({1}, at::kByte);
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(900));
      send(group, received, 0, 9).wait("message");
    } else {
      receive(group, received, 1, 9).wait("all-gather of unit 'l0'");
    }
  });
  set_slow_wait_threshold(std::chrono::seconds(30));
  const auto told = ::testing::internal::GetCapturedStderr();
  const std::string line = "rank 0 still waits for the all-gather of unit 'l0': for rank 1";
  EXPECT_THAT(told, HasSubstr(line));
  EXPECT_EQ(told.find(line), told.rfind(line)) << "told twice";
}

}  // namespace
}  // namespace fsdp::internal
