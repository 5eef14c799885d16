// What the handle of a unit tells: its modules, its group, and whether the units below it
// lie on one mesh.
#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/units/plain_modules.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class UnitQueries : public Worlds {};

TEST_P(UnitQueries, ListUnitsRootsAndGroupsOfAModule) {
  on_ranks([](const DeviceMesh& mesh) {
    const auto leaf = weighted(), middle = weighted({{"leaf", leaf}}), empty = bare();
    middle->register_parameter("bias", torch::zeros({2}));
    middle->register_parameter("tied", middle->parameters(false)[0]);
    const auto root = bare({{"middle", middle}, {"empty", empty}});
    for (const auto& module : {leaf, middle, empty, root}) fully_shard(module, mesh);
    const auto units = fsdp_modules(*root);
    EXPECT_EQ(units.size(), 4u);
    EXPECT_EQ(fsdp_modules(*root, /*root_only=*/true).size(), 1u);
    std::vector<std::vector<torch::Tensor>> groups;
    for (const auto& unit : units) {
      if (auto group = unit.parameters(); !group.empty()) groups.push_back(std::move(group));
    }
    ASSERT_EQ(groups.size(), 2u);
    const auto entries = middle->named_parameters(false);
    ASSERT_EQ(groups[0].size(), 2u) << "a tied parameter counts once";
    EXPECT_TRUE(groups[0][0].is_same(entries["weight"]) && is_dtensor(groups[0][0]));
    EXPECT_TRUE(groups[0][1].is_same(entries["bias"]));
    ASSERT_EQ(groups[1].size(), 1u);
    EXPECT_TRUE(groups[1][0].is_same(leaf->parameters()[0]));
  });
}

TEST_P(UnitQueries, TellTheModulesOfEachUnit) {
  on_ranks([](const DeviceMesh& mesh) {
    const auto a = weighted(), b = weighted(), c = weighted({{"again", a}});
    const auto root = bare({{"a", a}, {"b", b}, {"c", c}});
    fully_shard(std::vector<torch::nn::Module*>{a.get(), b.get()}, mesh);
    fully_shard(c, mesh);
    fully_shard(root, mesh);
    std::vector<ModulePtr> first;
    for (const auto& unit : fsdp_modules(*root)) first.push_back(unit.modules().front());
    EXPECT_THAT(first, ElementsAre(root, a, c));
    EXPECT_THAT(get_fsdp_module(*b).modules(), ElementsAre(a, b));
  });
}

TEST_P(UnitQueries, OfAUnitThatDiedListNothing) {
  on_ranks([](const DeviceMesh& mesh) {
    auto module = weighted();
    const auto unit = fully_shard(module, mesh);
    EXPECT_EQ(unit.modules().size(), 1u);
    EXPECT_EQ(unit.parameters().size(), 1u);
    module.reset();
    EXPECT_THAT(unit.modules(), IsEmpty());
    EXPECT_THAT(unit.parameters(), IsEmpty());
    EXPECT_TRUE(unit.spans_single_mesh());
  });
}

INSTANTIATE_WORLDS(UnitQueries, 1, 2);

// The units of leaf, middle and root of a model of three levels, each on its mesh.
struct Levels {
  Levels(const DeviceMesh& on_leaf, const DeviceMesh& on_middle, const DeviceMesh& on_root)
      : leaf_unit(fully_shard(leaf, on_leaf)),
        middle_unit(fully_shard(middle, on_middle)),
        root_unit(fully_shard(root, on_root)) {}
  // In that order.
  std::vector<bool> span_single_meshes() const {
    return {leaf_unit.spans_single_mesh(), middle_unit.spans_single_mesh(),
            root_unit.spans_single_mesh()};
  }
  ModulePtr leaf = weighted(), middle = weighted({{"leaf", leaf}}),
            root = weighted({{"middle", middle}});
  FSDPModule leaf_unit, middle_unit, root_unit;
};

TEST(UnitQueriesOfMeshes, TellWhetherAllUnitsBelowShareTheProcessGroups) {
  run_ranks(4, [](int64_t) {
    const auto grid = init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
    const auto world = grid.flatten({"replicate", "shard"}, "world")["world"];
    const auto pairs = grid["shard"];
    EXPECT_THAT(Levels(world, world, world).span_single_meshes(), ElementsAre(true, true, true));
    EXPECT_THAT(Levels(pairs, world, world).span_single_meshes(), ElementsAre(true, false, false));
    EXPECT_THAT(Levels(pairs, pairs, world).span_single_meshes(), ElementsAre(true, true, false));
    EXPECT_THAT(Levels(grid, grid, grid).span_single_meshes(), ElementsAre(true, true, true));
    EXPECT_THAT(Levels(pairs, grid, grid).span_single_meshes(), ElementsAre(true, false, false))
        << "sharded alike, but with replicas and without";
  });
}

TEST(UnitQueriesOfMeshes, PassOverUnitsWithoutParameters) {
  on_ranks_of(2, [](const DeviceMesh& mesh) {
    const auto grid = init_device_mesh(torch::kCPU, {2, 1}, {"rows", "columns"});
    const auto a = weighted(), b = weighted(), root = bare({{"a", a}, {"b", b}});
    fully_shard(a, mesh);
    fully_shard(b, grid["rows"]);
    EXPECT_TRUE(fully_shard(root, grid["columns"]).spans_single_mesh()) << "one group, two meshes";
    EXPECT_TRUE(fully_shard(bare(), mesh).spans_single_mesh());
  });
}

}  // namespace
}  // namespace fsdp::testing
