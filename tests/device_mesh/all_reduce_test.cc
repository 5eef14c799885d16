// What a training loop asks of the other ranks itself.
#include "device_mesh/all_reduce.h"

#include "device_mesh/device_mesh.h"
#include "device_mesh/process_group.h"
#include "tests/support/errors.h"
#include "tests/support/worlds.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

namespace fsdp {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using testing::expect_error;
using ::testing::HasSubstr;
using testing::message_of;
using testing::on_ranks_of;
using testing::run_ranks;

TEST(AllReduce, OfANumberIsTheReductionOfAllRanksNumbers) {
  for (const int64_t world : {1, 2, 3}) {
    on_ranks_of(world, [&](int64_t rank, const DeviceMesh& mesh) {
      const auto own = 0.1 * static_cast<double>(rank + 1);
      double sum = 0;
      for (int64_t i = 0; i < world; ++i) sum += 0.1 * static_cast<double>(i + 1);
      EXPECT_DOUBLE_EQ(all_reduce(own, mesh), sum);
      EXPECT_DOUBLE_EQ(all_reduce(own, mesh, Reduce::kMean), sum / static_cast<double>(world));
      EXPECT_EQ(all_reduce(own, mesh, Reduce::kMax), 0.1 * static_cast<double>(world));
      EXPECT_EQ(all_reduce(own, mesh, Reduce::kMin), 0.1);
    });
  }
}

TEST(AllReduce, OfIntegersIsExactAndOfFloatsADouble) {
  on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    const int64_t large = (int64_t{1} << 53) + rank;
    const auto sum = all_reduce(large, mesh);
    static_assert(std::is_same_v<decltype(sum), const int64_t>);
    EXPECT_EQ(sum, (int64_t{1} << 54) + 1);
    EXPECT_EQ(all_reduce(1, mesh), 2);
    EXPECT_EQ(all_reduce(rank == 1, mesh, Reduce::kMax), 1);
    static_assert(std::is_same_v<decltype(all_reduce(1.0F, mesh)), double>);
    expect_error<c10::ValueError>(
        [&] { static_cast<void>(all_reduce(1, mesh, Reduce::kMean)); },
        HasSubstr("the mean of 'value', whose dtype is Long: pass a floating value (rank "));
  });
}

TEST(AllReduce, OfATensorKeepsShapeAndDtypeAndLeavesTheArgument) {
  for (const int64_t world : {1, 3}) {
    on_ranks_of(world, [&](int64_t rank, const DeviceMesh& mesh) {
      const at::Tensor numbers = at::arange(6).view({2, 3}).t();
      for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kLong, at::kByte}) {
        const at::Tensor own = at::add(numbers, rank).to(dtype);
        const at::Tensor before = own.clone();
        const at::Tensor sum = all_reduce(own, mesh);
        EXPECT_TRUE(sum.equal(at::add(numbers * world, world * (world - 1) / 2).to(dtype)));
        EXPECT_EQ(sum.scalar_type(), dtype);
        EXPECT_TRUE(own.equal(before));
      }
      EXPECT_EQ(all_reduce(at::zeros({0, 4}), mesh).sizes(), (std::vector<int64_t>{0, 4}));
      EXPECT_FALSE(all_reduce(at::zeros({2}).requires_grad_(), mesh).requires_grad());
    });
  }
}

TEST(AllReduce, OverAMeshOfTwoDimensionsIsOfAllItsRanks) {
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
    EXPECT_EQ(all_reduce(rank, mesh), 0 + 1 + 2 + 3);
    EXPECT_EQ(all_reduce(rank, mesh["tp"]), rank < 2 ? 0 + 1 : 2 + 3);
  });
}

TEST(AllReduce, NanOfOneRankIsNanOnAll) {
  on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    const auto own = rank == 1 ? std::numeric_limits<double>::quiet_NaN() : 1;
    for (const auto op : {Reduce::kSum, Reduce::kMean, Reduce::kMax, Reduce::kMin})
      EXPECT_TRUE(std::isnan(all_reduce(own, mesh, op)));
  });
}

// What each of two ranks is told when they do different things.
template <class Parts>
std::array<std::string, 2> told(const Parts& parts) {
  std::array<std::string, 2> texts;
  on_ranks_of(2, [&](int64_t rank, const DeviceMesh& mesh) {
    texts[static_cast<size_t>(rank)] = message_of([&] { parts(rank, mesh); });
  });
  return texts;
}

TEST(AllReduce, DifferentReductionsOrDtypesAreToldOnAllRanks) {
  EXPECT_THAT(told([](int64_t rank, const DeviceMesh& mesh) {
                static_cast<void>(all_reduce(1.0, mesh, rank == 0 ? Reduce::kSum : Reduce::kMax));
              }),
              Each(HasSubstr("rank 0 for the sum of Double values and rank 1 for the maximum of "
                             "Double values have called it")));
  EXPECT_THAT(told([](int64_t rank, const DeviceMesh& mesh) {
                if (rank == 0) static_cast<void>(all_reduce(1.0, mesh));
                if (rank == 1) static_cast<void>(all_reduce(1, mesh));
              }),
              Each(AllOf(HasSubstr("of Double"), HasSubstr("of Long"))));
}

TEST(AllReduce, AgainstABarrierBothAreNamedAtOnce) {
  EXPECT_THAT(told([](int64_t rank, const DeviceMesh& mesh) {
                if (rank == 0) barrier(mesh);
                if (rank == 1) static_cast<void>(all_reduce(1, mesh, Reduce::kMin));
              }),
              Each(AllOf(HasSubstr("out of order"), HasSubstr("barrier"),
                         HasSubstr("all_reduce (minimum)"))));
}

TEST(Barrier, NobodyLeavesBeforeAllHaveCome) {
  std::atomic<int> come{0};
  run_ranks(4, [&](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
    ++come;
    barrier(mesh);
    EXPECT_EQ(come, 4);
  });
}

TEST(IsRankZero, IsOfTheDefaultGroupAndBeforeThatOfTheLauncher) {
  EXPECT_TRUE(is_rank_zero());
  run_ranks(2, [](int64_t rank) { EXPECT_EQ(is_rank_zero(), rank == 0); });
}

}  // namespace
}  // namespace fsdp
