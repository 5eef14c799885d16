// Collectives of ranks that are threads, over groups with Gloo for tensors on CPU.
#include "device_mesh/collectives/backend/c10d_names.h"
#include "device_mesh/device_mesh.h"
#include "tests/simulated_accelerator/run.h"
#include "tests/simulated_accelerator/world.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <memory>

namespace fsdp::testing::simulated {
namespace {

using internal::kAllGather;
using internal::kAllToAll;
using internal::kReduceScatter;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Body = std::function<void(int64_t rank, const Group& group)>;

constexpr int64_t kRanks = 3;

void on_ranks(const std::shared_ptr<World>& world, const Body& body) {
  run_ranks(kRanks, [&](int64_t rank) {
    const c10::DeviceGuard guard(device(rank));
    const auto group = init_device_mesh(c10::kCPU, {kRanks}).group(0);
    serve_device(group, world);
    body(rank, group);
  });
}

// In every schedule, without anything unordered.
void in_all_schedules(const Body& body) {
  for (const auto& schedule : schedules(2)) {
    const auto report =
        run_in({.schedule = schedule}, [&] { on_ranks(std::make_shared<World>(), body); });
    EXPECT_THAT(report.unordered, IsEmpty()) << to_string(schedule);
    EXPECT_THAT(report.failures, IsEmpty()) << to_string(schedule);
  }
}

at::Tensor on_device(const at::Tensor& tensor, int64_t rank) {
  return tensor.to(device(rank), /*non_blocking=*/true);
}

TEST(Collectives, GatherRows) {
  in_all_schedules([](int64_t rank, const Group& group) {
    auto row = on_device(at::full({2}, 1.0 + static_cast<double>(rank)), rank);
    auto rows = at::zeros({6}, row.options());
    ((*group).*kAllGather)(rows, row, {})->wait();
    row.zero_();  // after the gather, since this stream has waited
    EXPECT_TRUE(rows.cpu().equal(at::tensor({1.0f, 1.0f, 2.0f, 2.0f, 3.0f, 3.0f})));
  });
}

TEST(Collectives, Reduce) {
  in_all_schedules([](int64_t rank, const Group& group) {
    auto rows = on_device(at::arange(6, at::kFloat) + static_cast<double>(rank), rank);
    auto row = at::zeros({2}, rows.options());
    ((*group).*kReduceScatter)(row, rows, {})->wait();
    EXPECT_TRUE(row.cpu().equal((at::arange(2, at::kFloat) + 2 * rank + 1) * 3));
    std::vector<at::Tensor> whole = {rows};
    c10d::AllreduceOptions options;
    for (const auto operation : {c10d::ReduceOp::MAX, c10d::ReduceOp::AVG}) {
      options.reduceOp = operation;
      group->allreduce(whole, options)->wait();
    }
    EXPECT_TRUE(rows.cpu().equal(at::arange(6, at::kFloat) + 2));
  });
}

TEST(Collectives, ExchangeAndBroadcast) {
  in_all_schedules([](int64_t rank, const Group& group) {
    auto sent = on_device(at::arange(3) + 10 * rank, rank);
    auto received = at::zeros({3}, sent.options());
    std::vector<int64_t> equal;
    ((*group).*kAllToAll)(received, sent, equal, equal, {})->wait();
    EXPECT_TRUE(received.cpu().equal(at::arange(3) * 10 + rank));
    std::vector<int64_t> to_first = {3, 0, 0}, from_each(3, rank == 0 ? 3 : 0);
    auto collected = at::zeros({rank == 0 ? 9 : 0}, sent.options());
    ((*group).*kAllToAll)(collected, sent, from_each, to_first, {})->wait();
    if (rank == 0) {
      EXPECT_TRUE(collected.cpu().equal(at::tensor({0, 1, 2, 10, 11, 12, 20, 21, 22})));
    }
    std::vector<at::Tensor> value = {sent};
    c10d::BroadcastOptions options;
    options.rootRank = 1;
    group->broadcast(value, options)->wait();
    EXPECT_TRUE(sent.cpu().equal(at::arange(3) + 10));
  });
}

TEST(Collectives, OfTensorsOnCpuStayGloos) {
  in_all_schedules([](int64_t rank, const Group& group) {
    auto row = at::full({2}, rank), rows = at::zeros({6}, row.options());
    ((*group).*kAllGather)(rows, row, {})->wait();
    EXPECT_EQ(rows.sum().item<int64_t>(), 6);
    EXPECT_THAT(counters_now(device(rank)).collectives.by_name, IsEmpty());
  });
}

TEST(Collectives, DoNotMakeTheHostWait) {
  const auto report = run_in({.schedule = kLate}, [] {
    on_ranks(std::make_shared<World>(), [](int64_t rank, const Group& group) {
      auto row = at::ones({2}, at::TensorOptions(device(rank)));
      auto rows = at::zeros({6}, row.options());
      ((*group).*kAllGather)(rows, row, {})->wait();
      rows.mul_(2);
      EXPECT_EQ(counters_now(device(rank)).host_syncs.total, 0);
      EXPECT_EQ(counters_now(device(rank)).collectives.by_name["all-gather"], 1);
    });
  });
  EXPECT_THAT(report.failures, IsEmpty());
}

TEST(Collectives, KeepTheirTensorsUntilTheirWait) {
  in_all_schedules([](int64_t rank, const Group& group) {
    auto rows = at::zeros({6}, at::TensorOptions(device(rank)));
    auto row = at::ones({2}, rows.options());
    const auto work = ((*group).*kAllGather)(rows, row, {});
    row.reset();
    const auto of_same_size = at::full({2}, 7.0, rows.options());
    work->wait();
    EXPECT_EQ(rows.sum().item<float>(), 6);
  });
}

TEST(Collectives, MakeTheStreamWaitThatIsCurrentAtTheirWait) {
  in_all_schedules([](int64_t rank, const Group& group) {
    const auto side = open_stream(device(rank));
    auto rows = at::zeros({6}, at::TensorOptions(device(rank)));
    auto row = at::ones({2}, rows.options());
    const auto work = ((*group).*kAllGather)(rows, row, {});
    const c10::StreamGuard on_side(side);
    work->wait();
    EXPECT_EQ(rows.sum().item<float>(), 6);
  });
}

TEST(Collectives, WhoseWaitDoesNothingAreFoundAtOnce) {
  for (const auto& schedule : schedules(2)) {
    bool is_right = true;
    const auto report = run_in({.schedule = schedule}, [&] {
      on_ranks(std::make_shared<World>(World::Wait::kDoesNothing),
               [&](int64_t rank, const Group& group) {
                 auto row = at::ones({2}, at::TensorOptions(device(rank)));
                 auto rows = at::zeros({6}, row.options());
                 ((*group).*kAllGather)(rows, row, {})->wait();
                 const auto sum = rows.sum().item<float>();
                 if (rank == 0) is_right = sum == 6;
               });
    });
    EXPECT_THAT(report.unordered, Contains(HasSubstr("all-gather"))) << to_string(schedule);
    if (schedule == kLate) {
      EXPECT_FALSE(is_right);
    }
  }
}

TEST(Collectives, OfManyGroupsDoNotMeetEachOther) {
  const auto world = std::make_shared<World>();
  const auto report = run_in({.schedule = kLate}, [&] {
    on_ranks(world, [&](int64_t rank, const Group& group) {
      const Membership member = {"world", static_cast<int>(rank), 3, {0, 1, 2}, {}};
      const auto first = make_backend(world, member), second = make_backend(world, member);
      auto row = at::full({1}, rank, at::TensorOptions(device(rank)));
      std::vector<at::Tensor> sum = {row.clone()}, product = {row + 1};
      auto of_sum = first->allreduce(sum, {});
      c10d::AllreduceOptions options;
      options.reduceOp = c10d::ReduceOp::PRODUCT;
      auto of_product = second->allreduce(product, options);
      of_sum->wait();
      of_product->wait();
      EXPECT_EQ(sum[0].item<int64_t>(), 3);
      EXPECT_EQ(product[0].item<int64_t>(), 6);
      group->barrier(c10d::BarrierOptions())->wait();
    });
  });
  const auto issued = world->issued();
  EXPECT_THAT(issued.at(0),
              ElementsAre("world all-reduce of 8 bytes", "world all-reduce of 8 bytes"));
  EXPECT_EQ(issued.at(1), issued.at(0));
  EXPECT_THAT(report.unordered, IsEmpty());
}

// Each on a stream of its own: what is issued on one stream has that order.
TEST(Collectives, InDifferentOrdersOnOneStreamAreNamed) {
  const auto world = std::make_shared<World>();
  run_in({.schedule = kLate, .patience = kSlowdown * std::chrono::milliseconds(500)}, [&] {
    EXPECT_THAT(
        message_of([&] {
          on_ranks(world, [&](int64_t rank, const Group&) {
            const auto at = static_cast<int>(rank);
            const auto first = make_backend(world, {"first", at, 3, {0, 1, 2}, {}});
            const auto second = make_backend(world, {"second", at, 3, {0, 1, 2}, {}});
            std::vector<at::Tensor> value = {at::ones({1}, at::TensorOptions(device(rank)))};
            c10d::AllreduceOptions options;
            options.asyncOp = false;
            (rank == 1 ? second : first)->allreduce(value, options);
            (rank == 1 ? first : second)->allreduce(value, options);
            value[0].cpu();
          });
        }),
        HasSubstr("different orders"));
  });
}

TEST(Collectives, ThatARankNeverIssuesAreNamed) {
  const Settings settings = {.schedule = kLate,
                             .patience = kSlowdown * std::chrono::milliseconds(200)};
  run_in(settings, [] {
    const auto message = message_of([] {
      on_ranks(std::make_shared<World>(), [](int64_t rank, const Group& group) {
        if (rank == 2) return;
        std::vector<at::Tensor> value = {at::ones({1}, at::TensorOptions(device(rank)))};
        group->allreduce(value)->wait();
        value[0].cpu();
      });
    });
    EXPECT_THAT(message, HasSubstr("all-reduce', of which not every rank issued its part"));
    EXPECT_THAT(message, HasSubstr("issued by 2 of 3 ranks"));
  });
}

TEST(LoneBackend, HasPeersThatSendWhatItSends) {
  for (const auto& schedule : schedules(2)) {
    run_in({.schedule = schedule}, [] {
      const auto alone = make_lone_backend({"alone", 1, 3, {0, 1, 2}, {}});
      auto rows = at::arange(6, at::kFloat).to(device(0)), row = at::zeros({2}, rows.options());
      alone->_reduce_scatter_base(row, rows, {})->wait();
      EXPECT_TRUE(row.cpu().equal(at::tensor({6.0f, 9.0f})));
      alone->_allgather_base(rows, row, {})->wait();
      EXPECT_EQ(rows.sum().item<float>(), 45);
      std::vector<at::Tensor> whole = {row};
      alone->allreduce(whole, {})->wait();
      EXPECT_EQ(row.sum().item<float>(), 45);
    });
  }
}

}  // namespace
}  // namespace fsdp::testing::simulated
