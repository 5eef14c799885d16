// The order in which modules and units are walked, and what is a root.
#include "fully_shard/units/module_tree.h"

#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/units/unit_names.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace fsdp::testing {
namespace {

using internal::ModuleTree;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

// A module with one parameter, unless it is bare, and whatever children a test gives it.
struct Node : torch::nn::Module {
  explicit Node(bool bare = false) {
    if (!bare) weight = register_parameter("weight", torch::ones({4}));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& child : children()) x = std::dynamic_pointer_cast<Node>(child)->forward(x);
    return weight.defined() ? x * weight : x;
  }
  torch::Tensor weight;
};
using NodePtr = std::shared_ptr<Node>;

NodePtr node(std::vector<std::pair<std::string, NodePtr>> children = {}, bool bare = false) {
  auto made = std::make_shared<Node>(bare);
  for (auto& [name, child] : children) made->register_module(name, child);
  return made;
}

std::vector<std::string> paths(const ModuleTree& tree) {
  std::vector<std::string> all;
  for (size_t i = 0; i < tree.size(); ++i) all.push_back(tree.path(i));
  return all;
}

TEST(ModuleTree, IsWalkedInPreOrderChildrenAsRegistered) {
  const auto root = node({{"b", node({{"c", node()}})}, {"a", node()}});
  EXPECT_THAT(paths(ModuleTree({root.get()})), ElementsAre("", "b", "b.c", "a"));
}

TEST(ModuleTree, ASharedModuleIsVisitedOnceWhereItIsMetFirst) {
  const auto shared = node();
  const auto root = node({{"a", node({{"c", shared}})}, {"b", node()}, {"c", shared}});
  EXPECT_THAT(paths(ModuleTree({root.get()})), ElementsAre("", "a", "a.c", "b"));
}

TEST(ModuleTree, AChainOfManyThousandModulesDoesNotUseUpTheStack) {
  std::vector<NodePtr> chain = {std::make_shared<Node>(/*bare=*/true)};
  for (int i = 0; i < 50000; ++i) chain.push_back(node({{"n", chain.back()}}, /*bare=*/true));
  EXPECT_EQ(ModuleTree({chain.back().get()}).size(), chain.size());
  // Modules destroy their children recursively.
  while (chain.size() > 1) {
    auto last = std::move(chain.back());
    chain.pop_back();
    last.reset();
  }
}

TEST(ModuleTree, SeveralStartsAreTold) {
  const auto a = node({{"x", node()}}), b = node();
  EXPECT_THAT(paths(ModuleTree({a.get(), b.get()})), ElementsAre("[0]", "[0].x", "[1]"));
}

TEST(ModuleTree, StopsAtUnitsWhenAskedAndKnowsTheNearest) {
  on_one_rank([](const DeviceMesh& mesh) {
    const auto inner = node({{"deep", node()}});
    const auto root = node({{"plain", node({{"inner", inner}})}});
    const auto inner_unit = fully_shard(inner, mesh), root_unit = fully_shard(root, mesh);
    const ModuleTree whole({root.get()});
    EXPECT_THAT(paths(whole), ElementsAre("", "plain", "plain.inner", "plain.inner.deep"));
    EXPECT_EQ(whole.nearest_unit(1), internal::unit_of(root_unit));
    EXPECT_EQ(whole.nearest_unit(3), internal::unit_of(inner_unit));
    EXPECT_EQ(whole.unit(1), nullptr);
    EXPECT_THAT(paths(ModuleTree({root.get()}, ModuleTree::Stop::kAtUnits)),
                ElementsAre("", "plain", "plain.inner"));
    EXPECT_EQ(ModuleTree({inner.get()}, ModuleTree::Stop::kAtUnits).size(), 2u) << "a start";
  });
}

TEST(Units, AreListedInPreOrderEachOnce) {
  on_one_rank([](const DeviceMesh& mesh) {
    const auto c = node(), d = node(), empty = node({}, /*bare=*/true);
    const auto b = node({{"c", c}});
    const auto root = node({{"b", b}, {"d", d}, {"again", c}, {"empty", empty}});
    for (const auto& module : {c, b, d, empty, root}) fully_shard(module, mesh);
    EXPECT_THAT(names(fsdp_modules(*root)), ElementsAre("", "b", "b.c", "d", "empty"));
    EXPECT_THAT(names(fsdp_modules(*root, /*root_only=*/true)), ElementsAre(""));
    EXPECT_THAT(names(fsdp_modules(*b)), ElementsAre("b", "b.c"));
    EXPECT_THAT(fsdp_modules(*b, /*root_only=*/true), IsEmpty());
    const auto plain = node();
    EXPECT_THAT(fsdp_modules(*plain), IsEmpty());
    EXPECT_FALSE(is_fsdp_module(*plain)) << "a look-up adds nothing";
  });
}

TEST(Units, AUnitOfSeveralModulesIsListedOnceAndNamesItsParametersApart) {
  on_one_rank([](const DeviceMesh& mesh) {
    const auto a = node(), b = node(), root_of_both = node({{"a", a}, {"b", b}});
    const auto unit = fully_shard(std::vector<torch::nn::Module*>{a.get(), b.get()}, mesh);
    const auto name_of = [](const NodePtr& module) {
      try {
        module->weight.set_data(torch::ones({4}));
      } catch (const c10::Error& error) {
        return std::string(error.what_without_backtrace());
      }
      return std::string();
    };
    EXPECT_THAT(name_of(a), ::testing::HasSubstr("'[0].weight'"));
    EXPECT_THAT(name_of(b), ::testing::HasSubstr("'[1].weight'"));
    fully_shard(root_of_both, mesh);
    EXPECT_THAT(name_of(a), ::testing::HasSubstr("'a.weight'"));
    EXPECT_THAT(name_of(b), ::testing::HasSubstr("'b.weight'"));
    EXPECT_THAT(names(fsdp_modules(*root_of_both)), ElementsAre("", "a"));
    const auto above = node({{"pair", root_of_both}});
    fully_shard(above, mesh);
    EXPECT_THAT(name_of(b), ::testing::HasSubstr("'pair.b.weight'"));
    EXPECT_EQ(unit.name(), "pair.a");
  });
}

TEST(Units, AreRootsUntilAnEnclosingUnitComesAndOnceItsModuleDied) {
  on_one_rank([](const DeviceMesh& mesh) {
    const auto inner = node();
    const auto unit = fully_shard(inner, mesh);
    EXPECT_TRUE(unit.is_root());
    auto outer = node({{"plain", node({{"inner", inner}})}});
    const auto outer_unit = fully_shard(outer, mesh);
    EXPECT_FALSE(unit.is_root());
    EXPECT_TRUE(outer_unit.is_root());
    EXPECT_EQ(unit.name(), "plain.inner");
    outer.reset();
    EXPECT_TRUE(unit.is_root());
  });
}

TEST(Units, AreForgottenWithTheirModules) {
  on_one_rank([](const DeviceMesh& mesh) {
    std::vector<std::weak_ptr<internal::Unit>> units;
    for (int i = 0; i < 8; ++i) {
      const auto module = node();
      units.push_back(internal::unit_of(fully_shard(module, mesh)));
    }
    const auto last = node();
    fully_shard(last, mesh);  // sweeps
    for (const auto& unit : units) EXPECT_TRUE(unit.expired());
  });
}

}  // namespace
}  // namespace fsdp::testing
