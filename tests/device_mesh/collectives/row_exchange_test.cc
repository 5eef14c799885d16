#include "device_mesh/collectives/backend/row_exchange.h"

#include "device_mesh/process_group.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace fsdp::internal {
namespace {

using testing::run_ranks;
using Rounds = RowExchangeOptions::Rounds;

TEST(RowExchange, GivesTheSumOfThisRanksRowsWithOneSpareRow) {
  for (int64_t world : {1, 2, 3, 4}) {
    for (const auto rounds : {Rounds::kInWait, Rounds::kInBackground}) {
      run_ranks(world, [&](int64_t rank) {
        auto rows = at::empty({world, 40}, at::kByte);
        for (int64_t r = 0; r < world; ++r)
          rows[r].view(at::kFloat).copy_(at::arange(10).add(100 * rank + r));
        std::atomic<int> agreed = 0;
        RowExchange exchange(
            default_process_group(), rows, Summands(at::kFloat),
            {.what = "sum", .tag = 5, .agree = [&] { ++agreed; }, .rounds = rounds});
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

// Row r has r floats that count.
TEST(RowExchange, SendsTheBeginningsOfRowsOfDifferentLengths) {
  for (int64_t world : {1, 2, 3, 4}) {
    for (const auto rounds : {Rounds::kInWait, Rounds::kInBackground}) {
      run_ranks(world, [&](int64_t rank) {
        auto rows = at::empty({world, 16}, at::kByte);
        std::vector<int64_t> lengths;
        for (int64_t r = 0; r < world; ++r) {
          rows[r].view(at::kFloat).copy_(at::arange(4).add(100 * rank + r));
          lengths.push_back(4 * r);
        }
        RowExchange exchange(default_process_group(), rows, Summands(at::kFloat),
                             {.what = "sum", .lengths = lengths, .tag = 5, .rounds = rounds});
        const auto of_ranks = 100 * world * (world - 1) / 2;
        EXPECT_TRUE(at::equal(exchange.wait(),
                              at::arange(rank).add(rank).mul(world).add(of_ranks).to(at::kFloat)));
      });
    }
  }
}

TEST(RowExchange, WithoutAgreementNothingIsWaitedFor) {
  run_ranks(3, [](int64_t rank) {
    const auto begin = std::chrono::steady_clock::now();
    RowExchange exchange(default_process_group(), at::zeros({3, 40 + 8 * rank}, at::kByte),
                         Summands(at::kFloat),
                         {.what = "sum",
                          .tag = 5 + static_cast<int>(rank),
                          .agree = [] { throw std::runtime_error("no agreement"); },
                          .rounds = Rounds::kInBackground});
    EXPECT_THROW(exchange.wait(), std::runtime_error);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  });
}

}  // namespace
}  // namespace fsdp::internal
