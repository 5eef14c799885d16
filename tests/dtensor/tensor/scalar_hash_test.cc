// Numbers that went into what comes from parameters, on a mesh of two dimensions.
#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace fsdp {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

// As what is computed from a parameter is.
at::Tensor marked(const at::Tensor& whole, const DeviceMesh& mesh,
                  const std::vector<Placement>& placements) {
  const at::Tensor made = distribute_tensor(whole, mesh, placements);
  internal::set_from_parameter(made);
  return made;
}

// Ranks that meet nobody who differs along the first dimension learn of it along the
// next.
TEST(ScalarHash, ThatDifferAreToldToAllWhomAMoveBringsTogether) {
  testing::run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2});
    const at::Tensor whole = at::arange(20.0).view({4, 5});
    const at::Tensor t = marked(whole, mesh, {Shard{0}, Shard{1}});
    const DTensor scaled(t.mul(rank == 3 ? 2.0 : 3.0));
    EXPECT_THAT(message_of([&] { scaled.full_tensor(); }), HasSubstr("were given to aten::mul."));
    EXPECT_TRUE(DTensor(t.mul(3.0)).full_tensor().equal(whole * 3));
  });
}

// Each pair of ranks has a value of its own.
TEST(ScalarHash, MayDifferBetweenRanksThatAreNotBroughtTogether) {
  testing::run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2});
    const at::Tensor whole = at::arange(20.0).view({4, 5});
    const DTensor scaled(marked(whole, mesh, {Replicate{}, Shard{0}}).mul(rank < 2 ? 2.0 : 3.0));
    EXPECT_TRUE(scaled.full_tensor().equal(whole * (rank < 2 ? 2.0 : 3.0)));
  });
}

TEST(ScalarHash, OfEveryKindOfMoveAreCompared) {
  testing::run_ranks(3, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {3});
    const at::Tensor whole = at::arange(42.0).view({6, 7});
    const double own = rank == 1 ? 2 : 3;
    const auto moved = [&](const at::Tensor& dtensor, const Placement& to) {
      return message_of([&] { DTensor(dtensor).redistribute({to}); });
    };
    const at::Tensor cut = marked(whole, mesh, {Shard{0}}).mul(own);
    const at::Tensor terms = marked(whole, mesh, {Shard{0}}).sum(0).mul(own);
    EXPECT_THAT(moved(cut, Replicate{}), HasSubstr("is not the same on all ranks"));
    EXPECT_THAT(moved(cut, Shard{1}), HasSubstr("is not the same on all ranks"));
    EXPECT_THAT(moved(terms, Replicate{}), HasSubstr("is not the same on all ranks"));
    EXPECT_THAT(moved(terms, Shard{0}), HasSubstr("is not the same on all ranks"));
  });
}

TEST(ScalarHash, WithoutAParameterAreTheCallersAffair) {
  testing::run_ranks(2, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const at::Tensor t = distribute_tensor(at::ones({4, 6}), mesh, {Shard{0}});
    EXPECT_EQ(DTensor(t.mul(rank + 1)).full_tensor().sum().item<double>(), 36);
  });
}

}  // namespace
}  // namespace fsdp
