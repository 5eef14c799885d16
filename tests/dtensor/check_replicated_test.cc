// Plain tensors that are not the same on all ranks, where DTensors take them to be.
#include "device_mesh/debug.h"
#include "dtensor/dtensor.h"
#include "tests/dtensor/compare_with_plain.h"
#include "tests/dtensor/random_placements.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using testing::run_ranks;
using testing::waves;

class CheckReplicated : public ::testing::Test {
 protected:
  void SetUp() override { set_debug_options({.check_replicated = true}); }
  void TearDown() override { set_debug_options({}); }
};

TEST_F(CheckReplicated, NamesWhatDiffersOnAllRanks) {
  run_ranks(3, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {3}, {"tp"});
    const at::Tensor t = distribute_tensor(waves({4, 6}), mesh, {Shard{1}});
    at::Tensor plain = waves({4, 6});
    EXPECT_EQ(error_of([&] { t.mul(plain); }), "no error");
    if (rank == 2) plain[3][5] += 1e-9;
    const auto differs = AllOf(HasSubstr("operand 1, of shape ["),
                               HasSubstr("], differs between coordinates 0 and 2"),
                               HasSubstr("rank " + std::to_string(rank)));
    EXPECT_THAT(error_of([&] { t.mul(plain); }), AllOf(HasSubstr("aten::mul"), differs));
    EXPECT_THAT(error_of([&] { t.add_(plain); }), AllOf(HasSubstr("aten::add_"), differs));
    EXPECT_THAT(error_of([&] { at::mm(t, plain.t()); }), AllOf(HasSubstr("aten::mm"), differs));
    EXPECT_THAT(error_of([&] { t.mul(plain[3][5]); }), AllOf(HasSubstr("aten::mul"), differs));
    EXPECT_THAT(error_of([&] { t.clone().copy_(plain); }), HasSubstr("aten::copy_"));
    EXPECT_EQ(error_of([&] { t.mul(2).add(t); }), "no error");
  });
}

// Everyone sees it, also who has the same as their neighbours.
TEST_F(CheckReplicated, IsOfAllDimensionsOfTheMesh) {
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2});
    const at::Tensor t = distribute_tensor(waves({4, 6}), mesh, {Shard{1}, Replicate{}});
    EXPECT_EQ(error_of([&] { t.mul(waves({6})); }), "no error");
    EXPECT_THAT(error_of([&] { t.mul(waves({6}).add(rank == 3 ? 1 : 0)); }),
                HasSubstr("not the same on all ranks"));
  });
}

TEST_F(CheckReplicated, IsOffByDefault) {
  set_debug_options({});
  run_ranks(2, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const at::Tensor t = distribute_tensor(waves({4, 6}), mesh, {Shard{1}});
    EXPECT_EQ(error_of([&] { t.mul(waves({6}).add(rank)); }), "no error");
  });
}

}  // namespace
}  // namespace fsdp
