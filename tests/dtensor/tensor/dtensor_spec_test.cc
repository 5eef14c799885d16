#include "dtensor/tensor/dtensor_spec.h"

#include "tests/support/thread_ranks.h"

#include <gtest/gtest.h>

namespace fsdp::internal {
namespace {

const Placement kReplicated = Replicate{};

DTensorSpec spec_on(const DeviceMesh& mesh, std::vector<Placement> placements) {
  return {mesh, std::move(placements), {5, 4}, {1, 5}};
}

TEST(DTensorSpec, OthersAreMadeFromIt) {
  testing::run_ranks(4, [](int64_t) {
    const auto spec = spec_on(init_device_mesh(c10::kCPU, {2, 2}), {Partial{}, Shard{0}});
    EXPECT_EQ(spec.with_placements({Shard{1}, kReplicated}),
              spec_on(spec.mesh(), {Shard{1}, kReplicated}));
    EXPECT_EQ(spec.without_partials(), spec_on(spec.mesh(), {kReplicated, Shard{0}}));
    EXPECT_EQ(spec.replicated(), spec_on(spec.mesh(), {kReplicated, kReplicated}));
    EXPECT_EQ(spec.with_shape({2, 3}), spec.with_geometry({2, 3}, {3, 1}));
    EXPECT_EQ(spec.with_shape({2, 3}).placements(), spec.placements());
  });
}

TEST(DTensorSpec, SaysWhatIsPartialAndWhatIsCut) {
  testing::run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 1});
    const auto spec = spec_on(mesh, {Shard{0}, Shard{1}});
    EXPECT_TRUE(spec.is_cut(0));
    EXPECT_FALSE(spec.is_cut(1));  // by one rank
    EXPECT_FALSE(spec.has_partial());
    EXPECT_TRUE(spec_on(mesh, {Shard{0}, Partial{}}).has_partial());
  });
}

TEST(DTensorSpec, KnowsItsRanksPart) {
  testing::run_ranks(3, [](int64_t rank) {
    const auto spec = spec_on(init_device_mesh(c10::kCPU, {3}), {Shard{0}});
    const std::vector<std::vector<Chunk>> boxes{
        {{0, 2}, {0, 4}}, {{2, 2}, {0, 4}}, {{4, 1}, {0, 4}}};
    EXPECT_EQ(spec.local_boxes(),
              (std::vector<LocalBox>{{boxes[static_cast<size_t>(rank)], {0, 0}}}));
    EXPECT_EQ(spec.local_shape(), (std::vector<int64_t>{rank == 2 ? 1 : 2, 4}));
    EXPECT_EQ(spec.replicated().local_shape(), spec.shape());
  });
}

}  // namespace
}  // namespace fsdp::internal
