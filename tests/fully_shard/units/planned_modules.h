// Trees of modules, and what plan_units() chooses in them.
//
//   const auto root = stage({{"x", linear(2, 2)}});
//   EXPECT_THAT(planned_paths(root, by_type<torch::nn::Linear>()), ElementsAre("x", ""));
#pragma once

#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/units/plain_modules.h"
#include "tests/support/start_values.h"

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

namespace fsdp::testing {

// A module with the children that a test gives it, and nothing else.
struct Stage : torch::nn::Module {};
struct SpecialStage : Stage {};

template <class Kind = Stage>
ModulePtr stage(const NamedModules& children) {
  auto made = std::make_shared<Kind>();
  for (const auto& [name, child] : children) made->register_module(name, child);
  return made;
}

inline ModulePtr linear(int64_t in, int64_t out) { return make_linear(in, out).ptr(); }

inline std::vector<std::string> planned_paths(const UnitPlan& plan) {
  std::vector<std::string> all;
  for (const auto& unit : plan.units) all.push_back(unit.path);
  return all;
}

inline std::vector<std::string> planned_paths(const ModulePtr& root, const WrapPolicy& policy,
                                              const FullyShardOptions& options = {}) {
  return planned_paths(plan_units(root, policy, options));
}

inline std::vector<int64_t> planned_numels(const ModulePtr& root, const WrapPolicy& policy) {
  std::vector<int64_t> all;
  for (const auto& unit : plan_units(root, policy).units) all.push_back(unit.numel);
  return all;
}

inline WrapPolicy exactly(std::vector<ModulePtr> modules) {
  return by_fn([modules](torch::nn::Module& module) {
    return std::any_of(modules.begin(), modules.end(),
                       [&](const ModulePtr& chosen) { return chosen.get() == &module; });
  });
}

// What a policy was asked: path, recurse, numel.
using Question = std::tuple<std::string, bool, int64_t>;
using Questions = std::vector<Question>;

// The path of each module, that of the root being empty.
inline std::map<const torch::nn::Module*, std::string> paths_below(torch::nn::Module& root) {
  std::map<const torch::nn::Module*, std::string> paths = {{&root, ""}};
  for (const auto& child : root.named_modules("", /*include_self=*/false))
    paths.emplace(child.value().get(), child.key());
  return paths;
}

}  // namespace fsdp::testing
