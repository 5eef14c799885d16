// Blocks of tensors whose dimensions lie in another order in memory.
#include "dtensor/dtensor.h"
#include "tests/dtensor/compare_with_plain.h"
#include "tests/dtensor/random_placements.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace fsdp {
namespace {

using testing::run_ranks;
using testing::waves;
using testing::whole;

TEST(BlocksInMemory, OfATransposedTensorKeepItsOrder) {
  run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const at::Tensor plain = waves({6, 8}).t();
    const at::Tensor cut = distribute_tensor(plain, mesh, {Shard{.dim = 0, .outer = 2}});
    EXPECT_EQ(DTensor(cut).to_local().strides(), (std::vector<int64_t>{1, 4}));
    EXPECT_TRUE(whole(cut.t().view(-1)).equal(plain.t().view(-1)));
  });
}

}  // namespace
}  // namespace fsdp
