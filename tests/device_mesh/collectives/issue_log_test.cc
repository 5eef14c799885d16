#include "device_mesh/collectives/issue_log.h"

#include "device_mesh/collectives/announcement.h"
#include "device_mesh/collectives/backend/c10d_collectives.h"
#include "device_mesh/collectives/watched_rank.h"
#include "device_mesh/device_mesh.h"
#include "device_mesh/process_group.h"
#include "tests/support/errors.h"
#include "tests/support/process_ranks.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/with_environment.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <string>
#include <vector>

namespace fsdp::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;

std::shared_ptr<IssueLog> log_of(const DeviceMesh& mesh, int64_t dim) {
  return IssueLog::of(mesh.group(dim), mesh.device_type());
}

TEST(IssueLog, IsOnePerGroupAndSharedByItsSlices) {
  run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {1, 2}, {"dp", "tp"});
    EXPECT_EQ(log_of(mesh, 1), log_of(mesh["tp"], 0));
    EXPECT_NE(log_of(mesh, 0), log_of(mesh, 1));
  });
}

TEST(IssueLog, GivesTheAgreementsOfAllRanksInOrder) {
  for (int64_t world : {1, 2, 3}) {
    run_ranks(world, [&](int64_t rank) {
      const auto mesh = init_device_mesh(c10::kCPU, {world});
      std::vector<NoticeWords> expected;
      for (int64_t r = 0; r < world; ++r) expected.push_back({static_cast<uint64_t>(10 + r)});
      const auto log = log_of(mesh, 0);
      std::vector<Announcement> announced;
      for (uint32_t unit = 0; unit < 5; ++unit) {
        announced.push_back(log->announce(
            {.unit = unit, .what = "all-gather", .words = {static_cast<uint64_t>(10 + rank)}}));
      }
      for (size_t i = 5; i-- > 0;) EXPECT_EQ(announced[i].wait(), expected);
    });
  }
}

// What `rank` sends to `receiver`.
at::Tensor payload_of(int64_t rank, int64_t receiver, int64_t bytes) {
  return at::arange(bytes).add(7 * rank + 3 * receiver).remainder(251).to(at::kByte);
}

class Payloads : public ::testing::TestWithParam<const char*> {
 private:
  const testing::WithEnvironment switched_{"FSDP_PEER_MEMORY", GetParam()};
};

INSTANTIATE_TEST_SUITE_P(PeerMemory, Payloads, ::testing::Values("on", "off"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(Payloads, ComeWithTheNotices) {
  for (int64_t world : {2, 3, 4}) {
    run_ranks(world, [&](int64_t rank) {
      const auto log = log_of(init_device_mesh(c10::kCPU, {world}), 0);
      for (int64_t bytes : {int64_t{0}, int64_t{5}, payload_room(world)}) {
        std::vector<at::Tensor> rows;
        for (int64_t to = 0; to < world; ++to) rows.push_back(payload_of(rank, to, bytes));
        const auto shared = payload_of(rank, rank, bytes).view({1, -1});
        auto to_each = log->announce({.what = "reduction", .bytes = bytes}, at::stack(rows));
        auto to_all = log->announce({.what = "gather", .bytes = bytes}, shared);
        auto none = log->announce({.what = "barrier"});
        none.wait();
        to_all.wait();
        to_each.wait();
        for (int64_t from = 0; from < world; ++from) {
          const auto place = static_cast<size_t>(from);
          EXPECT_TRUE(at::equal(to_each.payloads()[place], payload_of(from, rank, bytes)));
          EXPECT_TRUE(at::equal(to_all.payloads()[place], payload_of(from, from, bytes)));
        }
      }
      EXPECT_TRUE(log->tells());
    });
  }
}

TEST_P(Payloads, OfOperationsThatDifferAreRefusedWithTheOperations) {
  run_ranks(3, [](int64_t rank) {
    const auto log = log_of(init_device_mesh(c10::kCPU, {3}), 0);
    const int64_t bytes = rank == 1 ? payload_room(3) : 3;
    auto announced = log->announce({.what = rank == 1 ? "gather" : "sum", .bytes = bytes},
                                   at::zeros({1, bytes}, at::kByte));
    EXPECT_THAT(message_of<c10::Error>([&] { announced.wait(); }),
                AllOf(HasSubstr("rank 1 issued the gather"), HasSubstr("issued the sum")));
  });
}

TEST_P(Payloads, NeedAPeer) {
  run_ranks(1, [](int64_t) { EXPECT_FALSE(log_of(init_device_mesh(c10::kCPU, {1}), 0)->tells()); });
}

TEST(IssueLog, BesideAnotherHasAnOrderOfItsOwn) {
  run_ranks(2, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const auto log = log_of(mesh, 0), beside = log->beside(mesh.side_group(0, "beside"));
    std::vector<Announcement> announced;
    // Ranks issue on the two in opposite orders.
    for (const auto& each : rank == 0 ? std::vector{log, beside} : std::vector{beside, log}) {
      announced.push_back(each->announce({.what = each == log ? "gather" : "reduction"}));
    }
    for (auto& each : announced) EXPECT_NO_THROW(each.wait());
  });
}

TEST(IssueLog, BesideAnotherEndsWithIt) {
  run_ranks(2, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const auto log = log_of(mesh, 0), beside = log->beside(mesh.side_group(0, "beside"));
    const auto other = rank == 0 ? "gather" : "sum";
    EXPECT_THROW(beside->announce({.what = other, .bytes = rank}).wait(), c10::Error);
    EXPECT_THAT(message_of<c10::Error>([&] { log->announce({.what = "later gather"}); }),
                AllOf(HasSubstr("the later gather can not go on"), HasSubstr("out of order")));
  });
}

const testing::ChildCase kWaitInTwoLanes("wait_in_two_lanes", [] {
  set_wait_patience(std::chrono::hours(1), std::chrono::hours(1));  // nobody else finds out
  init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(2)});
  const auto mesh = init_device_mesh(c10::kCPU, {2});
  const auto log = log_of(mesh, 0), beside = log->beside(mesh.side_group(0, "beside"));
  log->announce({.what = "first gather", .bytes = 8}).wait();
  if (mesh.rank() == 0) {
    log->announce({.what = "second gather", .bytes = 4}).wait();
  } else {
    beside->announce({.what = "first reduction", .bytes = 4}).wait();
  }
  return 0;
});

TEST(IssueLog, RanksThatWaitForOneAnotherLearnWhereTheyPart) {
  for (const auto& end : testing::run_processes("wait_in_two_lanes", 2, std::chrono::seconds(40))) {
    EXPECT_EQ(end.exit_code, 1);
    EXPECT_THAT(end.output,
                HasSubstr("the ranks part first at operation 3: rank 0 issued second gather (4 "
                          "bytes); rank 1 issued nothing; and at operation 1: rank 0 issued "
                          "nothing; rank 1 issued first reduction (4 bytes)"));
  }
}

TEST(IssueLog, RemembersWhatItIssued) {
  run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const auto log = log_of(mesh, 0), beside = log->beside(mesh.side_group(0, "beside"));
    log->announce({.what = "gather", .bytes = 8}).wait();
    beside->announce({.what = "reduction", .bytes = 4}).wait();
    const std::vector<RecordedOperation> expected = {
        {.lane = 0,
         .sequence = 1,
         .what = "making of the group for beside",
         .bytes = 0,
         .kind = CollectiveKind::kAllReduce},
        {.lane = 0, .sequence = 2, .what = "gather", .bytes = 8},
        {.lane = 1, .sequence = 1, .what = "reduction", .bytes = 4}};
    EXPECT_EQ(log->recent_operations(), expected);
    EXPECT_EQ(beside->recent_operations(), expected);
  });
}

TEST(IssueLog, ChecksBeforeItRunsACollective) {
  run_ranks(2, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const auto log = log_of(mesh, 0);
    auto all = at::empty({2});
    log->run({.what = "gather of ranks", .bytes = 4}, [&] {
      return all_gather(mesh.group(0), all, at::full({1}, static_cast<float>(rank)));
    });
    EXPECT_EQ(all[1].item<float>(), 1);
    bool ran = false;
    const auto other = rank == 0 ? "sum of losses" : "gather of ranks";
    EXPECT_THAT(message_of<c10::Error>([&] {
                  log->run({.what = other, .bytes = 4 + 4 * rank}, [&] {
                    ran = true;
                    return Pending();
                  });
                }),
                AllOf(HasSubstr("rank 0 issued the sum of losses"),
                      HasSubstr("rank 1 issued the gather of ranks")));
    EXPECT_FALSE(ran);
  });
}

TEST(IssueLog, ACollectiveThatFailsIsTheReasonWhyNothingElseIsIssued) {
  run_ranks(1, [](int64_t) {
    const auto log = log_of(init_device_mesh(c10::kCPU, {1}), 0);
    EXPECT_THROW(log->watch([] { TORCH_CHECK(false, "the cable is out"); }), c10::Error);
    EXPECT_THROW(log->watch([] { TORCH_CHECK(false, "a second reason"); }), c10::Error);
    EXPECT_THAT(message_of<c10::Error>([&] { log->announce({.what = "all-gather of unit 'l0'"}); }),
                AllOf(HasSubstr("the all-gather of unit 'l0' can not go on"),
                      HasSubstr("the cable is out"), HasSubstr("start anew")));
  });
}

TEST(IssueLog, AfterDestroyProcessGroupNothingIsIssued) {
  run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {1, 2}, {"dp", "tp"});
    const auto log = log_of(mesh, 1);
    log->announce({.what = "all-gather of unit 'l0'"}).wait();
    destroy_process_group();
    for (const int64_t dim : {0, 1}) {
      EXPECT_THAT(message_of<c10::Error>(
                      [&] { log_of(mesh, dim)->announce({.what = "all-gather of unit 'l0'"}); }),
                  HasSubstr("destroy_process_group() has ended"));
    }
  });
}

}  // namespace
}  // namespace fsdp::internal
