// What plan_units() makes of a policy's choices, and what it refuses.
#include "tests/fully_shard/units/planned_modules.h"
#include "tests/support/errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
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
