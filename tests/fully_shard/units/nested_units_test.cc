// Units below units: at any depth, by several paths, below two roots, with parameters
// that a call left alone.
#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/units/unit_names.h"
#include "tests/support/full_value.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::ElementsAre;
using torch::Tensor;

// A product with one weight, unless it is bare, after whatever children a test gives it.
struct Factor : torch::nn::Module {
  explicit Factor(bool bare) {
    if (!bare) weight = register_parameter("weight", torch::full({4}, 2.0));
  }
  Tensor forward(Tensor x) {
    for (const auto& child : children()) x = std::dynamic_pointer_cast<Factor>(child)->forward(x);
    return weight.defined() ? x * weight : x;
  }
  Tensor weight;
};
using FactorPtr = std::shared_ptr<Factor>;
using Factors = std::vector<std::pair<std::string, FactorPtr>>;

FactorPtr factor(const Factors& children = {}, bool bare = false) {
  auto made = std::make_shared<Factor>(bare);
  for (const auto& [name, child] : children) made->register_module(name, child);
  return made;
}
FactorPtr plain(const Factors& children) { return factor(children, /*bare=*/true); }

class NestedUnits : public Worlds {};

TEST_P(NestedUnits, AreBelowTheRootAtAnyDepthThroughPlainModules) {
  on_ranks([](const DeviceMesh& mesh) {
    const auto inner = factor(), outer = factor({{"q", plain({{"inner", inner}})}});
    const auto root = factor({{"p", plain({{"outer", outer}})}});
    const auto inner_unit = fully_shard(inner, mesh);
    EXPECT_TRUE(inner_unit.is_root());
    const auto outer_unit = fully_shard(outer, mesh);
    EXPECT_FALSE(inner_unit.is_root());
    EXPECT_TRUE(outer_unit.is_root());
    EXPECT_EQ(inner_unit.name(), "q.inner");
    const auto root_unit = fully_shard(root, mesh);
    EXPECT_FALSE(inner_unit.is_root());
    EXPECT_FALSE(outer_unit.is_root());
    EXPECT_TRUE(root_unit.is_root());
    EXPECT_EQ(inner_unit.name(), "p.outer.q.inner");
    EXPECT_THAT(names(fsdp_modules(*root)), ElementsAre("", "p.outer", "p.outer.q.inner"));
    EXPECT_FALSE(is_fsdp_module(*root->children()[0])) << "plain modules stay plain";
  });
}

TEST_P(NestedUnits, OfAPlainParentAreRootsWithTheirChildren) {
  on_ranks([](const DeviceMesh& mesh) {
    const auto pair_of_units = [&] {
      const auto child = factor(), parent = factor({{"child", child}});
      fully_shard(child, mesh);
      fully_shard(parent, mesh);
      return parent;
    };
    const auto first = pair_of_units(), second = pair_of_units();
    const auto both = plain({{"first", first}, {"second", second}});
    EXPECT_THAT(names(fsdp_modules(*both)), ElementsAre("", "child", "", "child"));
    const auto roots = fsdp_modules(*both, /*root_only=*/true);
    ASSERT_EQ(roots.size(), 2u);
    EXPECT_EQ(roots[0], get_fsdp_module(*first));
    EXPECT_EQ(roots[1], get_fsdp_module(*second));
  });
}

// What stands below a living root stays there; what stands below none is adopted.
TEST_P(NestedUnits, OfALivingRootStayBelowItWhenASecondUnitContainsThem) {
  on_ranks([&](const DeviceMesh& mesh) {
    const auto shared = factor(), fresh = factor();
    const auto root = factor({{"shared", shared}});
    const auto second = factor({{"again", shared}, {"fresh", fresh}});
    for (const auto& module : {shared, root, fresh, second}) fully_shard(module, mesh);
    EXPECT_TRUE(get_fsdp_module(*root).is_root());
    EXPECT_TRUE(get_fsdp_module(*second).is_root());
    EXPECT_FALSE(get_fsdp_module(*shared).is_root());
    EXPECT_FALSE(get_fsdp_module(*fresh).is_root());
    EXPECT_THAT(names(fsdp_modules(*root)), ElementsAre("", "shared"));
    EXPECT_THAT(names(fsdp_modules(*second)), ElementsAre("", "shared", "fresh"));

    const auto expect_reductions = [&](const FactorPtr& model, int64_t units) {
      const auto before = counters(mesh).reduce_scatters;
      model->forward(torch::ones({4})).sum().backward();
      EXPECT_EQ(counters(mesh).reduce_scatters - before, world() == 1 ? 0 : units);
      EXPECT_EQ(resident_bytes(counters(mesh)), 0);
    };
    const auto gradient = [](const FactorPtr& module) {
      return full_gradient(module->parameters(/*recurse=*/false)[0]);
    };
    expect_reductions(second, 3);  // 2 * 2 * 2, the gradient of each factor 2 * 2
    for (const auto& module : {shared, fresh, second})
      EXPECT_TRUE(torch::equal(gradient(module), torch::full({4}, 4.0)));
    EXPECT_FALSE(gradient(root).defined());
    expect_reductions(root, 2);  // 2 * 2
    EXPECT_TRUE(torch::equal(gradient(root), torch::full({4}, 2.0)));
    EXPECT_TRUE(torch::equal(gradient(shared), torch::full({4}, 4.0 + 2.0)));
  });
}

TEST_P(NestedUnits, AreListedAlikeOnEveryRank) {
  std::mutex mutex;
  std::map<int64_t, std::vector<std::string>> by_rank;
  on_ranks([&](const DeviceMesh& mesh) {
    const auto c = factor(), d = factor(), b = factor({{"c", c}});
    const auto a = factor({{"b", b}, {"d", d}});
    for (const auto& module : {c, d, b, a}) fully_shard(module, mesh);
    const std::lock_guard lock(mutex);
    by_rank[mesh.rank()] = names(fsdp_modules(*a));
  });
  ASSERT_EQ(by_rank.size(), static_cast<size_t>(world()));
  for (const auto& [rank, listed] : by_rank)
    EXPECT_THAT(listed, ElementsAre("", "b", "b.c", "d")) << rank;
}

// Forward runs the shared factor twice, 2 * 2 * 2 * 2 in all.
TEST_P(NestedUnits, AUnitReachedByTwoPathsIsOneUnit) {
  on_ranks([&](const DeviceMesh& mesh) {
    const auto shared = factor();
    const auto root = factor({{"one", plain({{"x", shared}})}, {"two", factor({{"x", shared}})}});
    fully_shard(shared, mesh);
    fully_shard(root, mesh);
    EXPECT_THAT(names(fsdp_modules(*root)), ElementsAre("", "one.x"));
    const auto before = counters(mesh);
    const auto loss = root->forward(torch::ones({4})).sum();
    EXPECT_EQ(loss.item<float>(), 4 * 16);
    loss.backward();
    EXPECT_EQ(counters(mesh).reduce_scatters - before.reduce_scatters, world() == 1 ? 0 : 2);
    EXPECT_TRUE(torch::equal(full_gradient(shared->parameters()[0]), torch::full({4}, 16.0)));
  });
}

TEST_P(NestedUnits, AModuleBelowTwoModulesOfOneUnitIsShardedOnce) {
  on_ranks([&](const DeviceMesh& mesh) {
    const auto shared = factor();
    const auto a = factor({{"x", shared}}), b = factor({{"x", shared}});
    fully_shard(std::vector<torch::nn::Module*>{a.get(), b.get()}, mesh);
    const auto before = counters(mesh);
    (a->forward(torch::ones({4})) + b->forward(torch::ones({4}))).sum().backward();
    EXPECT_EQ(counters(mesh).reduce_scatters - before.reduce_scatters, world() == 1 ? 0 : 1);
    EXPECT_TRUE(a->children()[0]->parameters()[0].is_same(b->children()[0]->parameters()[0]));
    EXPECT_TRUE(torch::equal(full_gradient(shared->parameters()[0]), torch::full({4}, 4.0)));
    EXPECT_TRUE(torch::equal(full_gradient(b->parameters()[0]), torch::full({4}, 2.0)));
  });
}

TEST_P(NestedUnits, WhatAnInnerCallIgnoredStaysPlainInTheOuterOne) {
  on_ranks([](const DeviceMesh& mesh) {
    const auto inner = factor();
    inner->register_parameter("scalar", torch::ones({}));  // refused where it is not ignored
    const auto root = factor({{"inner", inner}});
    const auto ignored = inner->parameters();
    fully_shard(inner, mesh, {.ignored_params = ignored});
    fully_shard(root, mesh);
    EXPECT_TRUE(is_fsdp_module(*inner));
    for (size_t i = 0; i < ignored.size(); ++i) {
      EXPECT_FALSE(is_dtensor(inner->parameters()[i]));
      EXPECT_TRUE(inner->parameters()[i].is_same(ignored[i]));
    }
    EXPECT_TRUE(is_dtensor(root->parameters()[0]));
    const auto scale = 1.0 + static_cast<double>(mesh.rank());
    root->forward(torch::full({4}, scale)).sum().backward();
    EXPECT_TRUE(torch::equal(ignored[0].grad(), torch::full({4}, 2 * scale)))
        << "this rank's own gradient";
  });
}

// Equal values do not make two parameters one.
TEST_P(NestedUnits, OfTwoEqualParametersOnlyTheOneNamedIsIgnored) {
  on_ranks([&](const DeviceMesh& mesh) {
    const auto left = factor(), right = factor();
    const auto root = plain({{"left", left}, {"right", right}});
    ASSERT_TRUE(torch::equal(left->weight, right->weight));
    fully_shard(root, mesh, {.ignored_params = {left->weight}});
    EXPECT_FALSE(is_dtensor(left->parameters()[0]));
    EXPECT_TRUE(left->parameters()[0].is_same(left->weight));
    EXPECT_TRUE(is_dtensor(right->parameters()[0]));
    const auto before = counters(mesh);
    const auto scale = 1.0 + static_cast<double>(mesh.rank());
    root->forward(torch::full({4}, scale)).sum().backward();
    EXPECT_EQ(counters(mesh).reduce_scatters - before.reduce_scatters, world() == 1 ? 0 : 1);
    EXPECT_TRUE(torch::equal(left->weight.grad(), torch::full({4}, 2 * scale)))
        << "this rank's own gradient";
    const auto mean_scale = (1.0 + static_cast<double>(world())) / 2;
    EXPECT_TRUE(
        torch::equal(full_gradient(right->parameters()[0]), torch::full({4}, 2 * mean_scale)));
  });
}

INSTANTIATE_WORLDS(NestedUnits, 1, 2, 4);

}  // namespace
}  // namespace fsdp::testing
