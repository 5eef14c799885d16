#include "device_mesh/collectives/backend/c10d_collectives.h"

#include "device_mesh/process_group.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace fsdp::internal {
namespace {

using testing::run_ranks;

// What rank r contributes: small integers, so that every reduction of them is exact in
// every dtype.
at::Tensor contribution(int64_t rank, int64_t numel, at::ScalarType dtype) {
  return at::arange(numel, at::kLong).add(rank).remainder(3).add(1).to(dtype);
}

at::Tensor all_contributions(int64_t world, int64_t numel, at::ScalarType dtype) {
  std::vector<at::Tensor> rows;
  for (int64_t rank = 0; rank < world; ++rank) rows.push_back(contribution(rank, numel, dtype));
  return at::stack(rows);
}

at::Tensor reduced(const at::Tensor& rows, ReduceOp op) {
  const auto wide = rows.to(at::kDouble);
  switch (op) {
    case ReduceOp::kSum:
      return wide.sum(0).to(rows.scalar_type());
    case ReduceOp::kMin:
      return wide.amin(0).to(rows.scalar_type());
    case ReduceOp::kMax:
      return wide.amax(0).to(rows.scalar_type());
    case ReduceOp::kProduct:
      return wide.prod(0).to(rows.scalar_type());
  }
  return {};
}

constexpr ReduceOp kAllOps[] = {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};

TEST(Collectives, GatherEveryDtypeAndWorld) {
  for (int64_t world : {1, 2, 3, 4}) {
    run_ranks(world, [&](int64_t rank) {
      const auto group = default_process_group();
      for (auto dtype :
           {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kByte, at::kLong, at::kBool}) {
        for (int64_t numel : {0, 1, 7}) {
          auto output = at::empty({world, numel}, dtype);
          all_gather(group, output, contribution(rank, numel, dtype)).wait("gather");
          EXPECT_TRUE(at::equal(output, all_contributions(world, numel, dtype)));
        }
      }
    });
  }
}

TEST(Collectives, ReduceEveryOperationDtypeAndWorld) {
  for (int64_t world : {1, 2, 3, 4}) {
    run_ranks(world, [&](int64_t rank) {
      const auto group = default_process_group();
      for (auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
        for (ReduceOp op : kAllOps) {
          const auto expected = reduced(all_contributions(world, world * 3, dtype), op);
          auto tensor = contribution(rank, world * 3, dtype);
          auto row = at::empty({3}, dtype);
          reduce_scatter(group, row, tensor, op).wait("reduce-scatter");
          EXPECT_TRUE(at::equal(row, expected.narrow(0, rank * 3, 3)));
          all_reduce(group, tensor, op).wait("all-reduce");
          EXPECT_TRUE(at::equal(tensor, expected));
        }
      }
      auto bytes = contribution(rank, world, at::kByte);
      auto row = at::empty({1}, at::kByte);
      reduce_scatter(group, row, bytes, ReduceOp::kSum).wait("reduce-scatter of bytes");
      EXPECT_TRUE(at::equal(
          row,
          reduced(all_contributions(world, world, at::kByte), ReduceOp::kSum).narrow(0, rank, 1)));
    });
  }
}

TEST(Collectives, BroadcastAllToAllAndBarrier) {
  for (int64_t world : {1, 2, 3}) {
    run_ranks(world, [&](int64_t rank) {
      const auto group = default_process_group();
      auto tensor = at::full({5}, rank, at::kLong);
      broadcast(group, tensor, world - 1).wait("broadcast");
      EXPECT_TRUE(at::equal(tensor, at::full({5}, world - 1, at::kLong)));
      auto output = at::empty({world, 2}, at::kLong);
      all_to_all(group, output, at::arange(world * 2, at::kLong).add(100 * rank).view({world, 2}))
          .wait("exchange");
      for (int64_t peer = 0; peer < world; ++peer) {
        EXPECT_TRUE(at::equal(output[peer], at::arange(2, at::kLong).add(100 * peer + 2 * rank)));
      }
      barrier(group);
    });
  }
}

TEST(Collectives, SeveralInFlightMeetInIssueOrder) {
  run_ranks(2, [](int64_t rank) {
    const auto group = default_process_group();
    std::vector<at::Tensor> outputs;
    std::vector<Pending> pending;
    for (int64_t i = 0; i < 20; ++i) {
      outputs.push_back(at::empty({2}, at::kLong));
      pending.push_back(
          all_gather(group, outputs.back(), at::full({1}, 100 * rank + i, at::kLong)));
    }
    EXPECT_TRUE(pending.front().in_flight());
    for (size_t i = 20; i-- > 0;) {
      pending[i].wait("gather");
      pending[i].wait("a second wait does nothing");
      EXPECT_FALSE(pending[i].in_flight());
      EXPECT_EQ(outputs[i][0].item<int64_t>(), static_cast<int64_t>(i));
      EXPECT_EQ(outputs[i][1].item<int64_t>(), 100 + static_cast<int64_t>(i));
    }
  });
}

TEST(Collectives, WrongSizesAreRefusedBeforeAnythingIsSent) {
  run_ranks(2, [](int64_t) {
    const auto group = default_process_group();
    EXPECT_THROW(all_gather(group, at::empty({3}), at::empty({2})), c10::ValueError);
    EXPECT_THROW(all_gather(group, at::empty({4}, at::kLong), at::empty({2})), c10::ValueError);
    EXPECT_THROW(all_gather(group, at::empty({4, 2}).t(), at::empty({4})), c10::ValueError);
    EXPECT_THROW(reduce_scatter(group, at::empty({2}), at::empty({5}), ReduceOp::kSum),
                 c10::ValueError);
    EXPECT_THROW(all_to_all(group, at::empty({3}), at::empty({3})), c10::ValueError);
    EXPECT_THROW(broadcast(group, at::empty({3}), 2), c10::ValueError);
    barrier(group);
  });
}

TEST(Collectives, FailureNamesOperationRankGroupAndBackend) {
  run_ranks(2, [](int64_t rank) {
    if (rank == 1) return;  // leaves, and its connections close
    auto output = at::empty({2});
    auto pending = all_gather(default_process_group(), output, at::empty({1}));
    try {
      pending.wait("all-gather of unit 'blocks.0'");
      FAIL() << "expected an error";
    } catch (const c10::DistBackendError& error) {
      const std::string text = error.what_without_backtrace();
      EXPECT_NE(text.find("all-gather of unit 'blocks.0' failed on rank 0 in group 'world' of "
                          "ranks 0, 1 (gloo)"),
                std::string::npos)
          << text;
    }
  });
}

TEST(Collectives, WhatCanNotBeIssuedIsToldByWaitWithTheOperationsName) {
  run_ranks(2, [](int64_t rank) {
    const auto group = default_process_group();
    const auto fault =
        std::make_shared<testing::Fault>(testing::Fault{.kind = testing::Fault::Kind::kError});
    testing::inject_fault(group, fault, std::chrono::seconds(20));
    auto two = at::ones({2}), one = at::ones({1});
    const std::pair<const char*, std::function<Pending()>> collectives[] = {
        {"gather", [&] { return all_gather(group, two, one); }},
        {"sum of rows", [&] { return reduce_scatter(group, one, two, ReduceOp::kSum); }},
        {"smallest row", [&] { return reduce_scatter(group, one, two, ReduceOp::kMin); }},
        {"sum", [&] { return all_reduce(group, one, ReduceOp::kSum); }},
        {"broadcast", [&] { return broadcast(group, one, 0); }},
        {"exchange", [&] { return all_to_all(group, at::empty({2}), two); }},
        {"message", [&] { return send(group, one, 1 - rank, /*tag=*/5); }}};
    for (const auto& [name, issue] : collectives) {
      fault->at = fault->issued;
      Pending pending;
      EXPECT_NO_THROW(pending = issue()) << name;
      EXPECT_TRUE(pending.in_flight()) << name;
      try {
        pending.wait(name);
        ADD_FAILURE() << name << ": expected an error";
      } catch (const c10::DistBackendError& error) {
        const std::string text = error.what_without_backtrace();
        EXPECT_TRUE(text.starts_with(std::string(name) + " failed on rank ")) << text;
        EXPECT_NE(text.find("injected failure"), std::string::npos) << text;
      }
    }
    two.fill_(3);
    reduce_scatter(group, one, two, ReduceOp::kSum).wait("sum of rows");
    EXPECT_EQ(one.item<float>(), 6) << "the completion still runs";
  });
}

TEST(Collectives, FakeGroupCompletesAtOnce) {
  init_process_group({.backend = "fake", .rank = 2, .world_size = 4});
  const auto group = default_process_group();
  EXPECT_EQ(group_rank(group), 2);
  EXPECT_EQ(group_size(group), 4);
  auto gathered = at::empty({4, 3});
  const auto input = at::arange(3, at::kFloat);
  all_gather(group, gathered, input).wait("gather");
  for (int64_t row = 0; row < 4; ++row) EXPECT_TRUE(at::equal(gathered[row], input));
  for (ReduceOp op : kAllOps) {
    auto row = at::empty({2});
    reduce_scatter(group, row, at::arange(8, at::kFloat), op).wait("reduce-scatter");
    EXPECT_TRUE(at::equal(row, at::arange(4, 6, at::kFloat)));
    auto tensor = at::arange(3, at::kFloat);
    all_reduce(group, tensor, op).wait("all-reduce");
    EXPECT_TRUE(at::equal(tensor, input));
  }
  auto exchanged = at::empty({4});
  all_to_all(group, exchanged, at::arange(4, at::kFloat)).wait("exchange");
  EXPECT_TRUE(at::equal(exchanged, at::arange(4, at::kFloat)));
  broadcast(group, exchanged, 3).wait("broadcast");
  barrier(group);
  destroy_process_group();
}

}  // namespace
}  // namespace fsdp::internal
