// What wrap policies are asked, and which modules they choose.
#include "tests/fully_shard/units/planned_modules.h"
#include "tests/support/errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <concepts>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torch::nn::Linear;
using torch::nn::Module;

// A module with one parameter of that many elements, and no memory.
ModulePtr large(int64_t numel) {
  auto made = std::make_shared<Stage>();
  made->register_parameter("weight", torch::empty({numel}, torch::kMeta));
  return made;
}

bool note_and_choose_linear(Questions* asked, const std::map<const Module*, std::string>& names,
                            Module& module, bool recurse, int64_t numel_left) {
  asked->emplace_back(names.at(&module), recurse, numel_left);
  return recurse || names.at(&module) == "left" || names.at(&module) == "left.first";
}

// The list is what FSDP1's _recursive_wrap asks about the same model.
TEST(WrapPolicy, IsAskedBeforeTheModulesBelowAndAfterThemWithTheNumelThatIsLeft) {
  const auto root = stage({{"left", stage({{"first", linear(2, 2)}, {"second", linear(1, 3)}})},
                           {"right", linear(4, 4)}});
  Questions asked;
  const auto plan =
      plan_units(root, std::bind_front(note_and_choose_linear, &asked, paths_below(*root)));
  EXPECT_EQ(asked, (Questions{{"", true, 32},
                              {"left", true, 12},
                              {"left.first", true, 6},
                              {"left.first", false, 6},
                              {"left.second", true, 6},
                              {"left.second", false, 6},
                              {"left", false, 6},
                              {"right", true, 20},
                              {"right", false, 20}}));
  EXPECT_THAT(planned_paths(plan), ElementsAre("left.first", "left", ""));
}

TEST(WrapPolicy, ThatDoesNotLookBelowAModuleChoosesNeitherItNorWhatIsBelow) {
  const auto left = stage({{"x", linear(2, 2)}});
  const auto root = stage({{"left", left}, {"right", linear(2, 2)}});
  const auto not_left = [&](Module& module, bool recurse, int64_t) {
    return !recurse || &module != left.get();
  };
  EXPECT_THAT(planned_paths(root, not_left), ElementsAre("right", ""));
  EXPECT_THAT(planned_paths(root, [](Module&, bool recurse, int64_t) { return !recurse; }),
              ElementsAre(""));
}

TEST(WrapPolicy, IsAskedAsFsdp1AsksByPoliciesBuiltOnIt) {
  const auto root = stage({{"a", stage({{"x", linear(2, 2)}})}, {"b", linear(2, 2)}});
  const auto only_leaves = [policy = every_module()](Module& module, bool recurse, int64_t left) {
    return policy(module, recurse, left) && (recurse || module.children().empty());
  };
  EXPECT_THAT(planned_paths(root, only_leaves), ElementsAre("a.x", "b", ""));
}

TEST(WrapPolicy, ByTypeTakesDerivedClassesAndModuleHolders) {
  const auto root = stage({{"plain", stage({{"x", linear(2, 2)}})},
                           {"special", stage<SpecialStage>({{"x", linear(2, 2)}})}});
  EXPECT_THAT(planned_paths(root, by_type<SpecialStage>()), ElementsAre("special", ""));
  EXPECT_THAT(planned_paths(root, by_type<Stage>()), ElementsAre("plain", "special", ""));
  EXPECT_THAT(planned_paths(root, by_type<Linear>()), ElementsAre("plain.x", "special.x", ""));
  EXPECT_THAT(planned_paths(root, by_type<SpecialStage, torch::nn::LinearImpl>()),
              ElementsAre("plain.x", "special.x", "special", ""));
}

TEST(WrapPolicy, BySizeComparesWhatIsLeftAndTakesTheThresholdItself) {
  const auto alone = stage({{"x", linear(4, 4)}});
  EXPECT_THAT(planned_paths(alone, by_size(20)), ElementsAre("x", ""));
  EXPECT_THAT(planned_paths(alone, by_size(21)), ElementsAre(""));
  // 20 + 12 + 6 elements: once `big` is a unit, 18 are left.
  const auto root =
      stage({{"body",
              stage({{"big", linear(4, 4)}, {"middle", linear(3, 3)}, {"small", linear(2, 2)}})}});
  EXPECT_THAT(planned_paths(root, by_size(18)), ElementsAre("body.big", "body", ""));
  EXPECT_THAT(planned_numels(root, by_size(18)), ElementsAre(20, 18, 0));
  EXPECT_THAT(planned_paths(root, by_size(19)), ElementsAre("body.big", ""));
  EXPECT_THAT(planned_numels(root, by_size(19)), ElementsAre(20, 18));
}

TEST(WrapPolicy, BySizeIsAHundredMillionUnlessGiven) {
  const auto root = stage({{"enough", large(100'000'000)}, {"less", large(99'999'999)}});
  EXPECT_THAT(planned_paths(root, by_size()), ElementsAre("enough", ""));
}

TEST(WrapPolicy, BySizeLeavesAttentionWholeAndContainersAlone) {
  // 60 + 20 elements, the latter in a Linear.
  const auto attention = std::make_shared<torch::nn::MultiheadAttentionImpl>(4, 1);
  EXPECT_THAT(planned_paths(stage({{"attention", attention}}), by_size(20)), ElementsAre(""));
  const auto list = std::make_shared<torch::nn::ModuleListImpl>();
  const auto dict = std::make_shared<torch::nn::ModuleDictImpl>();
  for (int i = 0; i < 2; ++i) list->push_back(linear(4, 4));
  dict->update(torch::OrderedDict<std::string, ModulePtr>({{"a", linear(3, 3)}}));
  const auto root = stage({{"list", list}, {"dict", dict}});
  EXPECT_THAT(planned_paths(root, by_size(12)), ElementsAre("list.0", "list.1", "dict.a", ""));
  EXPECT_THAT(planned_paths(root, by_size(40)), ElementsAre("")) << "the list has 40 elements";
}

TEST(WrapPolicy, EveryModuleIsEachButContainers) {
  const auto list = std::make_shared<torch::nn::ModuleListImpl>();
  list->push_back(stage({{"x", linear(2, 2)}}));
  EXPECT_THAT(planned_paths(stage({{"list", list}}), every_module()),
              ElementsAre("list.0.x", "list.0", ""));
}

TEST(WrapPolicy, ByAnyIsWhatOneOfThemWants) {
  const auto root = stage({{"special", stage<SpecialStage>({{"x", linear(2, 2)}})},
                           {"big", linear(4, 4)},
                           {"small", linear(2, 2)}});
  const auto either = by_any({by_type<SpecialStage>(), by_size(20)});
  EXPECT_THAT(planned_paths(root, either), ElementsAre("special", "big", ""));
}

TEST(WrapPolicy, ThatCanNotBeMeantIsRefused) {
  expect_error<c10::ValueError>([] { by_size(0); },
                                AllOf(HasSubstr("min_numel is 0"), HasSubstr("1 and more")));
  expect_error<c10::ValueError>([] { by_any({}); }, HasSubstr("list of policies is empty"));
  expect_error<c10::ValueError>([] { by_fn(std::function<bool(Module&)>()); },
                                HasSubstr("by_fn: the function is empty"));
  expect_error<c10::ValueError>([] { WrapPolicy(WrapPolicy::Ask()); },
                                HasSubstr("WrapPolicy: the function is empty"));
}

// An answer that is neither yes or no nor options does not compile.
template <class Answer>
concept IsAnswer = requires(std::function<Answer(Module&)> alone,
                            std::function<Answer(Module&, FullyShardOptions)> with_options) {
  requires requires { by_fn(alone); } || requires {
    by_fn(with_options);
  };
};
static_assert(IsAnswer<bool> && IsAnswer<std::optional<FullyShardOptions>>);
static_assert(!IsAnswer<std::string> && !IsAnswer<std::vector<int>>);
static_assert(!std::convertible_to<std::function<std::string(Module&, bool, int64_t)>, WrapPolicy>);

}  // namespace
}  // namespace fsdp::testing
