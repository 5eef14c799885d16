// What plan_units() makes of a policy's choices, and what it refuses.
#include "tests/fully_shard/units/planned_modules.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <sstream>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torch::nn::Linear;
using torch::nn::Module;

TEST(UnitPlan, VisitsASharedModuleOnceByTheFirstPathThatIsLookedInto) {
  const auto shared = linear(2, 2);
  const auto a = stage({{"s", shared}}), b = stage({{"s", shared}});
  const auto root = stage({{"a", a}, {"b", b}});
  EXPECT_THAT(planned_paths(root, by_type<Linear>()), ElementsAre("a.s", ""));
  EXPECT_THAT(planned_numels(root, by_type<Linear>()), ElementsAre(6, 0));
  const auto not_a = [&](Module& module, bool recurse, int64_t) {
    return recurse ? &module != a.get() : &module == shared.get();
  };
  EXPECT_THAT(planned_paths(root, not_a), ElementsAre("b.s", ""));
}

TEST(UnitPlan, CountsATiedParameterInTheFirstUnitThatHasIt) {
  const auto tied = torch::ones({8});
  const auto first = stage({}), second = stage({});
  for (const auto& module : {first, second}) module->register_parameter("weight", tied);
  second->register_parameter("bias", torch::ones({2}));
  const auto root = stage({{"first", first}, {"second", second}});
  EXPECT_THAT(planned_numels(root, exactly({first, second})), ElementsAre(8, 2, 0));
  EXPECT_THAT(planned_numels(root, exactly({})), ElementsAre(10));
}

TEST(UnitPlan, LeavesOutModulesWhoseParametersAreAllIgnored) {
  const auto ignored = linear(4, 4), kept = linear(2, 2);
  const auto partly = stage({{"kept", kept}, {"x", ignored}});
  const auto root = stage({{"partly", partly}, {"again", stage({{"x", ignored}})}});
  Questions asked;
  const auto names = paths_below(*root);
  const auto note = [&](Module& module, bool recurse, int64_t numel_left) {
    asked.emplace_back(names.at(&module), recurse, numel_left);
    return true;
  };
  EXPECT_THAT(planned_paths(root, note, {.ignored_params = ignored->parameters()}),
              ElementsAre("partly.kept", "partly", ""));
  EXPECT_EQ(asked, (Questions{{"", true, 6},
                              {"partly", true, 6},
                              {"partly.kept", true, 6},
                              {"partly.kept", false, 6},
                              {"partly", false, 0}}));
}

TEST(UnitPlan, IsPrintedALineAUnit) {
  const auto plan = plan_units(stage({{"x", linear(2, 2)}}), by_type<Linear>());
  EXPECT_EQ(plan.units[0], (PlannedUnit{"x", "torch::nn::LinearImpl", 6}));
  EXPECT_THAT(to_string(plan),
              AllOf(::testing::StartsWith("x: torch::nn::LinearImpl, 6 elements\n(root): "),
                    ::testing::EndsWith("Stage, 0 elements\n")));
  std::ostringstream printed;
  printed << plan;
  EXPECT_EQ(printed.str(), to_string(plan));
}

TEST(UnitPlan, ShowsWhereParametersLieOnSoManyRanks) {
  FullyShardOptions options;
  options.shard_placement_fn = [](const std::string&,
                                  const at::Tensor& tensor) -> std::optional<Placement> {
    if (tensor.dim() == 2) return Owned{};
    return tensor.size(0) == 6 ? std::optional<Placement>(Shard{.dim = 0, .unit = 3})
                               : std::nullopt;
  };
  const auto root = stage({{"x", linear(8, 6)}, {"y", linear(2, 2)}});
  const auto plan = plan_units(root, by_type<Linear>(), options, /*ranks=*/3);
  const std::vector<PlannedPlacement> of_x = {{"weight", Owned{2}},
                                              {"bias", Shard{.dim = 0, .unit = 3}}};
  EXPECT_EQ(plan.units[0].placements, of_x);
  EXPECT_THAT(to_string(plan), ::testing::StartsWith("x: torch::nn::LinearImpl, 54 elements\n"
                                                     "  weight: Owned(2)\n  bias: "));
  EXPECT_TRUE(plan_units(root, by_type<Linear>(), options).units[1].placements.empty());
}

// Owners and all: what fully_shard does on so many ranks.
TEST(UnitPlan, PlacesAsAutoShardDoes) {
  FullyShardOptions options;
  options.shard_placement_fn = [](const std::string&, const at::Tensor& tensor) {
    return tensor.dim() == 2 ? std::optional<Placement>(Owned{}) : std::nullopt;
  };
  const auto root = [] {
    return stage({{"x", linear(8, 4)}, {"y", linear(3, 5)}, {"z", linear(8, 4)}});
  };
  const auto plan = plan_units(root(), by_type<Linear>(), options, /*ranks=*/2);
  run_ranks(2, [&](int64_t) {
    const auto model = root();
    auto_shard(model, by_type<Linear>(), init_device_mesh(torch::kCPU, {2}), options);
    const auto parameters = model->named_parameters();
    for (const auto& unit : plan.units) {
      for (const auto& [name, placement] : unit.placements)
        EXPECT_EQ(DTensor(parameters[unit.path + "." + name]).placements()[0], placement);
    }
  });
}

TEST(UnitPlan, RefusesModulesThatCanNotBeUnitsByName) {
  const auto list = std::make_shared<torch::nn::ModuleListImpl>();
  list->push_back(linear(2, 2));
  expect_error<c10::ValueError>(
      [&] {
        plan_units(stage({{"layers", list}}), by_type<torch::nn::ModuleList>());
      },
      AllOf(HasSubstr("plan_units: module 'layers' (torch::nn::ModuleListImpl)"),
            HasSubstr("container without forward")));
  expect_error<c10::ValueError>([&] { plan_units(list, by_type<Linear>()); },
                                HasSubstr("module '(root)' (torch::nn::ModuleListImpl)"));
  expect_error<c10::ValueError>([] { plan_units(std::shared_ptr<Stage>(), every_module()); },
                                HasSubstr("plan_units: the module is null"));
}

TEST(UnitPlan, RefusesASharedModuleOfTwoUnitsUntilItIsOneItself) {
  const auto shared = linear(2, 2);
  const auto a = stage({{"s", shared}}), b = stage({{"inner", stage({{"s", shared}})}});
  const auto root = stage({{"a", a}, {"b", b}});
  expect_error<c10::ValueError>(
      [&] {
        plan_units(root, exactly({a, b}));
      },
      AllOf(HasSubstr("parameter 'weight' of a shared module (torch::nn::LinearImpl)"),
            HasSubstr("in unit 'a' and in unit 'b'")));
  expect_error<c10::ValueError>([&] { plan_units(root, exactly({a})); },
                                HasSubstr("in unit 'a' and in unit '(root)'"));
  EXPECT_THAT(planned_paths(root, exactly({shared, a, b})), ElementsAre("a.s", "a", "b", ""));
  EXPECT_THAT(planned_paths(root, exactly({})), ElementsAre(""));
}

}  // namespace
}  // namespace fsdp::testing
