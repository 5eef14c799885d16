// The collectives over both ways in which messages travel on one host: the same bits.
#include "device_mesh/collectives/collectives.h"
#include "device_mesh/device_mesh.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "device_mesh/peer_memory/peer_channel.h"
#include "device_mesh/process_group.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/with_environment.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

using ::testing::HasSubstr;
using testing::run_ranks;
using testing::WithEnvironment;

at::Tensor values_of(int64_t rank, int64_t count, at::ScalarType dtype) {
  auto values = at::empty({count}, at::kDouble);
  auto* const each = values.mutable_data_ptr<double>();
  for (int64_t i = 0; i < count; ++i)
    each[i] = std::sin(static_cast<double>(i * 7 + rank * 131)) * std::pow(10.0, (i + rank) % 5);
  return values.to(dtype);
}

// What every collective gives on this rank, behind one another, as doubles.
at::Tensor results_of(const Collectives& collectives, int64_t count, at::ScalarType dtype) {
  const auto rank = collectives.rank(), size = collectives.size();
  const auto own = values_of(rank, count, dtype);
  const auto rows = values_of(rank + 50, size * count, dtype);
  std::vector<at::Tensor> results;
  auto all = at::empty({size * count}, own.options());
  collectives.all_gather({.output = all, .input = own, .what = "gather"});
  results.push_back(all.clone());
  auto part = at::empty({count}, own.options());
  collectives.reduce_scatter({.output = part, .input = rows, .what = "scatter"});
  results.push_back(part.clone());
  auto sum = own.clone();
  collectives.all_reduce({.tensor = sum, .what = "sum"});
  results.push_back(sum);
  for (const auto op : {ReduceOp::kMin, ReduceOp::kMax}) {
    auto extreme = own.clone();
    collectives.all_reduce({.tensor = extreme, .what = "extreme", .op = op});
    results.push_back(extreme);
  }
  auto last = own.clone();
  collectives.broadcast({.tensor = last, .what = "broadcast", .root = size - 1});
  results.push_back(last);
  collectives.all_to_all({.output = all, .input = rows, .what = "exchange"});
  results.push_back(all.clone());
  collectives.barrier("barrier");
  results.push_back(collectives.rows_of_ranks({.row = own, .what = "rows"}).view({-1}));
  auto scattered = collectives.row_memory({size, static_cast<int64_t>(own.nbytes())}, at::kCPU);
  std::memcpy(scattered.mutable_data_ptr(), rows.const_data_ptr(), rows.nbytes());
  results.push_back(
      collectives
          .start(ReduceScatterOptions{
              .input = scattered, .summands = internal::Summands(dtype), .what = "rows"})
          .wait()
          .row);
  results.push_back(
      collectives.start(AllReduceOptions{.tensor = own.clone(), .what = "row"}).wait().row);
  auto gather = collectives.start(AllGatherOptions{.input = own.view(at::kByte), .what = "start"});
  const auto gathered = gather.wait();
  for (int64_t r = 0; r < size; ++r) {
    auto row = at::empty_like(own);
    std::memcpy(row.mutable_data_ptr(), gathered.row(r), row.nbytes());
    results.push_back(row);
  }
  for (auto& result : results) result = result.to(at::kDouble);
  return at::cat(results);
}

enum class Way { kPeerMemory, kGloo };

std::map<int64_t, at::Tensor> results_over(Way way, int64_t world, int64_t count,
                                           at::ScalarType dtype) {
  const WithEnvironment switched("FSDP_PEER_MEMORY", way == Way::kPeerMemory ? "on" : "off");
  std::map<int64_t, at::Tensor> by_rank;
  std::mutex mutex;
  run_ranks(world, [&](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {world});
    EXPECT_EQ(PeerChannel::of(mesh.group(0)) != nullptr, way == Way::kPeerMemory);
    const auto side = mesh.side_group(0, "beside");
    EXPECT_EQ(PeerChannel::of(side) != nullptr, way == Way::kPeerMemory);
    const auto collectives = collectives_of(mesh, 0);
    auto results = at::cat({results_of(collectives, count, dtype),
                            results_of(collectives.beside(side), count, dtype)});
    const std::lock_guard lock(mutex);
    by_rank[rank] = std::move(results);
  });
  return by_rank;
}

TEST(CollectivesInPeerMemory, HaveTheBitsThatTheyHaveOverGloo) {
  for (const int64_t world : {2, 3, 4}) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kInt}) {
      for (const int64_t count : {1, 7, 5000, 300'000}) {
        if (count == 300'000 && dtype != at::kFloat) continue;
        auto by_gloo = results_over(Way::kGloo, world, count, dtype);
        for (const auto& [rank, results] : results_over(Way::kPeerMemory, world, count, dtype))
          EXPECT_TRUE(at::equal(results, by_gloo[rank])) << world << " " << dtype << " " << count;
      }
    }
  }
}

TEST(CollectivesInPeerMemory, ALargeBroadcastArrivesPieceByPiece) {
  run_ranks(3, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {3});
    const auto values = at::arange(3'000'001, at::kFloat);
    auto received = rank == 1 ? values.clone() : at::zeros_like(values);
    collectives_of(mesh, 0).broadcast({.tensor = received, .what = "values", .root = 1});
    EXPECT_TRUE(at::equal(received, values));
  });
}

TEST(CollectivesInPeerMemory, ServeEachDimensionOfAMesh) {
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
    for (const int64_t dim : {0, 1}) {
      ASSERT_NE(PeerChannel::of(mesh.group(dim)), nullptr);
      auto sum = at::ones({3}) * static_cast<double>(rank);
      collectives_of(mesh, dim).all_reduce({.tensor = sum, .what = "sum"});
      const auto expected = dim == 0 ? 2 * (rank % 2) + 2 : 4 * (rank / 2) + 1;
      EXPECT_EQ(sum[0].item<int64_t>(), expected);
    }
  });
}

TEST(CollectivesInPeerMemory, RanksThatIssueDifferentOnesLearnOfIt) {
  run_ranks(2, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    auto value = at::ones({1 << 20});
    const std::string what = rank == 0 ? "the sum of weights" : "the sum of biases";
    testing::expect_error(
        [&] { collectives_of(mesh, 0).all_reduce({.tensor = value, .what = what}); },
        ::testing::AllOf(HasSubstr("weights"), HasSubstr("biases")));
    EXPECT_TRUE(at::equal(value, at::ones({1 << 20}))) << "nothing was changed";
  });
}

// The same name and size, and another result.
TEST(CollectivesInPeerMemory, RanksThatReduceByOtherOperationsLearnOfIt) {
  for (const char* const peer_memory : {"on", "off"}) {
    const WithEnvironment switched("FSDP_PEER_MEMORY", peer_memory);
    for (const bool is_scatter : {false, true}) {
      run_ranks(2, [&](int64_t rank) {
        const auto mesh = init_device_mesh(c10::kCPU, {2});
        const auto op = rank == 0 ? ReduceOp::kSum : ReduceOp::kMax;
        const auto collectives = collectives_of(mesh, 0);
        const auto values = at::ones({4});
        auto part = at::zeros({2});
        const auto mistake = [&] {
          is_scatter ? collectives.reduce_scatter(
                           {.output = part, .input = values, .what = "values", .op = op})
                     : collectives.all_reduce({.tensor = values, .what = "values", .op = op});
        };
        testing::expect_error(mistake, HasSubstr("collectives are out of order"));
        EXPECT_TRUE(at::equal(values, at::ones({4})) && at::equal(part, at::zeros({2})));
      });
    }
  }
}

// The same name and size, and other values: of another dtype, or another rank's.
TEST(CollectivesInPeerMemory, RanksThatMeanOtherDtypesOrRootsLearnOfIt) {
  for (const char* const peer_memory : {"on", "off"}) {
    const WithEnvironment switched("FSDP_PEER_MEMORY", peer_memory);
    for (const int mistake : {0, 1, 2, 3}) {
      run_ranks(2, [&](int64_t rank) {
        const auto mesh = init_device_mesh(c10::kCPU, {2});
        const auto collectives = collectives_of(mesh, 0);
        const auto dtype = rank == 0 ? at::kHalf : at::kBFloat16;
        const auto values = at::ones({4}, dtype);
        auto part = at::zeros({2}, dtype);
        const std::function<void()> mistakes[] = {
            [&] { collectives.all_reduce({.tensor = values, .what = "values"}); },
            [&] {
              collectives.reduce_scatter({.output = part, .input = values, .what = "values"});
            },
            [&] {
              collectives
                  .start(ReduceScatterOptions{.input = values.view(at::kByte).view({2, -1}).clone(),
                                              .summands = internal::Summands(dtype),
                                              .what = "rows",
                                              .unit = 3})
                  .wait();
            },
            [&] { collectives.broadcast({.tensor = values, .what = "values", .root = rank}); }};
        testing::expect_error(mistakes[mistake], HasSubstr("collectives are out of order"));
        EXPECT_TRUE(at::equal(values, at::ones({4}, dtype)));
        EXPECT_TRUE(at::equal(part, at::zeros({2}, dtype)));
      });
    }
  }
}

TEST(CollectivesInPeerMemory, AreNotUsedWhereABackendWasPutInPlace) {
  run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const auto group = mesh.group(0);
    ASSERT_NE(PeerChannel::of(group), nullptr);
    const auto other = mesh.side_group(0, "other")->getBackend(c10::kCPU);
    group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, other);
    EXPECT_EQ(PeerChannel::of(group), nullptr);
  });
}

TEST(CollectivesInPeerMemory, AnUnknownValueOfTheSwitchIsAnError) {
  const WithEnvironment switched("FSDP_PEER_MEMORY", "maybe");
  EXPECT_THAT(testing::message_of([] { run_ranks(2, [](int64_t) {}); }),
              ::testing::AllOf(HasSubstr("FSDP_PEER_MEMORY=maybe"), HasSubstr("on, copy and off")));
}

}  // namespace
}  // namespace fsdp::internal
