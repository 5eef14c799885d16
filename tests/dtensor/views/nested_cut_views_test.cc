// Views of tensors whose dimensions two mesh dimensions cut, one inside the other.
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
using Placements = std::vector<Placement>;

// Each of 11 blocks has one atom, so the first rank of the first mesh dimension has all,
// which a cut of any dimension can say.
TEST(NestedCutViews, OfADimensionThatOneRankHasStayRight) {
  run_ranks(4, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2});
    const at::Tensor plain = waves({7, 11});
    const at::Tensor cut = distribute_tensor(plain, mesh, {Shard{.dim = 1, .outer = 11}, Shard{1}});
    for (const std::vector<int64_t>& shape :
         std::vector<std::vector<int64_t>>{{11, 1, 7}, {7, 11, 1}, {77}, {11, 7}}) {
      EXPECT_TRUE(whole(cut.view(shape)).equal(plain.view(shape))) << at::IntArrayRef(shape);
    }
  });
}

TEST(NestedCutViews, KeepBothCutsWhereTheDimensionStays) {
  run_ranks(4, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2});
    const Placements both = {Shard{.dim = 1, .unit = 3}, Shard{1}};
    const at::Tensor cut = distribute_tensor(waves({2, 9, 4}), mesh, both);
    EXPECT_EQ(DTensor(cut.view({2, 9, 2, 2})).placements(), both);
    EXPECT_EQ(DTensor(cut.view({1, 2, 9, 4})).placements(),
              (Placements{Shard{.dim = 2, .unit = 3}, Shard{2}}));
  });
}

}  // namespace
}  // namespace fsdp
