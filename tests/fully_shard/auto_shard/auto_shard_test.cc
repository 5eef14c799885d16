// Units that a policy chooses: what policies are asked, what they choose, what is made of
// it, and what is refused.
#include "fully_shard/fully_shard.h"
#include "fully_shard/units/unit.h"
#include "tests/fully_shard/decoder.h"
#include "tests/fully_shard/effects/traffic.h"
#include "tests/fully_shard/pair.h"
#include "tests/fully_shard/units/unit_names.h"
#include "tests/support/errors.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <concepts>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using torch::nn::Linear;
using torch::nn::Module;
using ModulePtr = std::shared_ptr<Module>;
using Children = std::vector<std::pair<std::string, ModulePtr>>;

// A module with the children that a test gives it, and nothing else.
struct Stage : Module {};
struct SpecialStage : Stage {};

template <class Kind = Stage>
ModulePtr stage(const Children& children) {
  auto made = std::make_shared<Kind>();
  for (const auto& [name, child] : children) made->register_module(name, child);
  return made;
}

ModulePtr linear(int64_t in, int64_t out) { return make_linear(in, out).ptr(); }

// A module with one parameter of that many elements, and no memory.
ModulePtr large(int64_t numel) {
  auto made = std::make_shared<Stage>();
  made->register_parameter("weight", torch::empty({numel}, torch::kMeta));
  return made;
}

std::vector<std::string> paths(const UnitPlan& plan) {
  std::vector<std::string> all;
  for (const auto& unit : plan.units) all.push_back(unit.path);
  return all;
}

std::vector<std::string> paths(const ModulePtr& root, const WrapPolicy& policy,
                               const FullyShardOptions& options = {}) {
  return paths(plan_units(root, policy, options));
}

std::vector<int64_t> numels(const ModulePtr& root, const WrapPolicy& policy) {
  std::vector<int64_t> all;
  for (const auto& unit : plan_units(root, policy).units) all.push_back(unit.numel);
  return all;
}

WrapPolicy exactly(std::vector<ModulePtr> modules) {
  return by_fn([modules](Module& module) {
    return std::any_of(modules.begin(), modules.end(),
                       [&](const ModulePtr& chosen) { return chosen.get() == &module; });
  });
}

// What a policy was asked: path, recurse, numel.
using Question = std::tuple<std::string, bool, int64_t>;
using Questions = std::vector<Question>;

bool note_and_choose_linear(Questions* asked, const std::map<const Module*, std::string>& names,
                            Module& module, bool recurse, int64_t numel_left) {
  asked->emplace_back(names.at(&module), recurse, numel_left);
  return recurse || names.at(&module) == "left" || names.at(&module) == "left.first";
}

std::map<const Module*, std::string> names_of(Module& root) {
  std::map<const Module*, std::string> names = {{&root, ""}};
  for (const auto& child : root.named_modules("", /*include_self=*/false))
    names.emplace(child.value().get(), child.key());
  return names;
}

// The list is what FSDP1's _recursive_wrap asks about the same model.
TEST(WrapPolicy, IsAskedBeforeTheModulesBelowAndAfterThemWithTheNumelThatIsLeft) {
  const auto root = stage({{"left", stage({{"first", linear(2, 2)}, {"second", linear(1, 3)}})},
                           {"right", linear(4, 4)}});
  Questions asked;
  const auto plan =
      plan_units(root, std::bind_front(note_and_choose_linear, &asked, names_of(*root)));
  EXPECT_EQ(asked, (Questions{{"", true, 32},
                              {"left", true, 12},
                              {"left.first", true, 6},
                              {"left.first", false, 6},
                              {"left.second", true, 6},
                              {"left.second", false, 6},
                              {"left", false, 6},
                              {"right", true, 20},
                              {"right", false, 20}}));
  EXPECT_THAT(paths(plan), ElementsAre("left.first", "left", ""));
}

TEST(WrapPolicy, ThatDoesNotLookBelowAModuleChoosesNeitherItNorWhatIsBelow) {
  const auto left = stage({{"x", linear(2, 2)}});
  const auto root = stage({{"left", left}, {"right", linear(2, 2)}});
  const auto not_left = [&](Module& module, bool recurse, int64_t) {
    return !recurse || &module != left.get();
  };
  EXPECT_THAT(paths(root, not_left), ElementsAre("right", ""));
  EXPECT_THAT(paths(root, [](Module&, bool recurse, int64_t) { return !recurse; }),
              ElementsAre(""));
}

TEST(WrapPolicy, IsAskedAsFsdp1AsksByPoliciesBuiltOnIt) {
  const auto root = stage({{"a", stage({{"x", linear(2, 2)}})}, {"b", linear(2, 2)}});
  const auto only_leaves = [policy = every_module()](Module& module, bool recurse, int64_t left) {
    return policy(module, recurse, left) && (recurse || module.children().empty());
  };
  EXPECT_THAT(paths(root, only_leaves), ElementsAre("a.x", "b", ""));
}

TEST(WrapPolicy, ByTypeTakesDerivedClassesAndModuleHolders) {
  const auto root = stage({{"plain", stage({{"x", linear(2, 2)}})},
                           {"special", stage<SpecialStage>({{"x", linear(2, 2)}})}});
  EXPECT_THAT(paths(root, by_type<SpecialStage>()), ElementsAre("special", ""));
  EXPECT_THAT(paths(root, by_type<Stage>()), ElementsAre("plain", "special", ""));
  EXPECT_THAT(paths(root, by_type<Linear>()), ElementsAre("plain.x", "special.x", ""));
  EXPECT_THAT(paths(root, by_type<SpecialStage, torch::nn::LinearImpl>()),
              ElementsAre("plain.x", "special.x", "special", ""));
}

TEST(WrapPolicy, BySizeComparesWhatIsLeftAndTakesTheThresholdItself) {
  const auto alone = stage({{"x", linear(4, 4)}});
  EXPECT_THAT(paths(alone, by_size(20)), ElementsAre("x", ""));
  EXPECT_THAT(paths(alone, by_size(21)), ElementsAre(""));
  // 20 + 12 + 6 elements: once `big` is a unit, 18 are left.
  const auto root =
      stage({{"body",
              stage({{"big", linear(4, 4)}, {"middle", linear(3, 3)}, {"small", linear(2, 2)}})}});
  EXPECT_THAT(paths(root, by_size(18)), ElementsAre("body.big", "body", ""));
  EXPECT_THAT(numels(root, by_size(18)), ElementsAre(20, 18, 0));
  EXPECT_THAT(paths(root, by_size(19)), ElementsAre("body.big", ""));
  EXPECT_THAT(numels(root, by_size(19)), ElementsAre(20, 18));
}

TEST(WrapPolicy, BySizeIsAHundredMillionUnlessGiven) {
  const auto root = stage({{"enough", large(100'000'000)}, {"less", large(99'999'999)}});
  EXPECT_THAT(paths(root, by_size()), ElementsAre("enough", ""));
}

TEST(WrapPolicy, BySizeLeavesAttentionWholeAndContainersAlone) {
  // 60 + 20 elements, the latter in a Linear.
  const auto attention = std::make_shared<torch::nn::MultiheadAttentionImpl>(4, 1);
  EXPECT_THAT(paths(stage({{"attention", attention}}), by_size(20)), ElementsAre(""));
  const auto list = std::make_shared<torch::nn::ModuleListImpl>();
  const auto dict = std::make_shared<torch::nn::ModuleDictImpl>();
  for (int i = 0; i < 2; ++i) list->push_back(linear(4, 4));
  dict->update(torch::OrderedDict<std::string, ModulePtr>({{"a", linear(3, 3)}}));
  const auto root = stage({{"list", list}, {"dict", dict}});
  EXPECT_THAT(paths(root, by_size(12)), ElementsAre("list.0", "list.1", "dict.a", ""));
  EXPECT_THAT(paths(root, by_size(40)), ElementsAre("")) << "the list has 40 elements";
}

TEST(WrapPolicy, EveryModuleIsEachButContainers) {
  const auto list = std::make_shared<torch::nn::ModuleListImpl>();
  list->push_back(stage({{"x", linear(2, 2)}}));
  EXPECT_THAT(paths(stage({{"list", list}}), every_module()),
              ElementsAre("list.0.x", "list.0", ""));
}

TEST(WrapPolicy, ByAnyIsWhatOneOfThemWants) {
  const auto root = stage({{"special", stage<SpecialStage>({{"x", linear(2, 2)}})},
                           {"big", linear(4, 4)},
                           {"small", linear(2, 2)}});
  const auto either = by_any({by_type<SpecialStage>(), by_size(20)});
  EXPECT_THAT(paths(root, either), ElementsAre("special", "big", ""));
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

TEST(UnitPlan, VisitsASharedModuleOnceByTheFirstPathThatIsLookedInto) {
  const auto shared = linear(2, 2);
  const auto a = stage({{"s", shared}}), b = stage({{"s", shared}});
  const auto root = stage({{"a", a}, {"b", b}});
  EXPECT_THAT(paths(root, by_type<Linear>()), ElementsAre("a.s", ""));
  EXPECT_THAT(numels(root, by_type<Linear>()), ElementsAre(6, 0));
  const auto not_a = [&](Module& module, bool recurse, int64_t) {
    return recurse ? &module != a.get() : &module == shared.get();
  };
  EXPECT_THAT(paths(root, not_a), ElementsAre("b.s", ""));
}

TEST(UnitPlan, CountsATiedParameterInTheFirstUnitThatHasIt) {
  const auto tied = torch::ones({8});
  const auto first = stage({}), second = stage({});
  for (const auto& module : {first, second}) module->register_parameter("weight", tied);
  second->register_parameter("bias", torch::ones({2}));
  const auto root = stage({{"first", first}, {"second", second}});
  EXPECT_THAT(numels(root, exactly({first, second})), ElementsAre(8, 2, 0));
  EXPECT_THAT(numels(root, exactly({})), ElementsAre(10));
}

TEST(UnitPlan, LeavesOutModulesWhoseParametersAreAllIgnored) {
  const auto ignored = linear(4, 4), kept = linear(2, 2);
  const auto partly = stage({{"kept", kept}, {"x", ignored}});
  const auto root = stage({{"partly", partly}, {"again", stage({{"x", ignored}})}});
  Questions asked;
  const auto names = names_of(*root);
  const auto note = [&](Module& module, bool recurse, int64_t numel_left) {
    asked.emplace_back(names.at(&module), recurse, numel_left);
    return true;
  };
  EXPECT_THAT(paths(root, note, {.ignored_params = ignored->parameters()}),
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
  EXPECT_THAT(paths(root, exactly({shared, a, b})), ElementsAre("a.s", "a", "b", ""));
  EXPECT_THAT(paths(root, exactly({})), ElementsAre(""));
}

// A decoder of four blocks whose units are the blocks and the root, which has the rest.
class MeasuredBlocks {
 public:
  using ShardDecoder = std::function<void(Decoder&)>;
  MeasuredBlocks(const DeviceMesh& mesh, const ShardDecoder& shard) : mesh_(mesh) {
    build_seeded([this] {
      model = Decoder(8, kBlocks);
      return Model{model.ptr(), {}};
    });
    shard(model);
  }

  Traffic forward() {
    return traffic_of(mesh_, [this] { loss_ = loss_of(model, make_data(5)); });
  }
  Traffic backward() {
    return traffic_of(mesh_, [this] { loss_.backward(); });
  }
  // Gathers to have block `i` unsharded now: none where it is still.
  int64_t gathers_of_block(size_t i) {
    auto unit = get_fsdp_module(*model->blocks[i]);
    return traffic_of(mesh_, [&] { unit.unshard(); }).all_gathers;
  }

  Decoder model{nullptr};

 private:
  DeviceMesh mesh_;
  torch::Tensor loss_;
};

void expect_same(const Traffic& a, const Traffic& b) {
  EXPECT_EQ(a.all_gathers, b.all_gathers);
  EXPECT_EQ(a.reduce_scatters, b.reduce_scatters);
  EXPECT_EQ(a.all_gather_bytes, b.all_gather_bytes);
}

class AutoShard : public Worlds {
 protected:
  void on_ranks(const std::function<void(const DeviceMesh&)>& body) const {
    Worlds::on_ranks([&](int64_t, const DeviceMesh& mesh) { body(mesh); });
  }
  // World 1 sends nothing.
  int64_t sent(int64_t messages) const { return world() == 1 ? 0 : messages; }
};

TEST_P(AutoShard, ByTypeMakesEveryBlockAndTheRootUnitsAsByHand) {
  on_ranks([&](const DeviceMesh& mesh) {
    MeasuredBlocks chosen(mesh, [&](Decoder& model) {
      EXPECT_TRUE(auto_shard(model, by_type<Block>(), mesh).is_root());
    });
    MeasuredBlocks by_hand(mesh, [&](Decoder& model) {
      for (auto& block : model->blocks) fully_shard(block, mesh);
      fully_shard(model, mesh);
    });
    EXPECT_THAT(names(fsdp_modules(*chosen.model)),
                ElementsAre("", "block0", "block1", "block2", "block3"));
    for (int step = 0; step < 2; ++step) {
      const auto forward = chosen.forward();
      EXPECT_EQ(forward.all_gathers, sent(kBlocks + 1)) << step;
      expect_same(forward, by_hand.forward());
      const auto backward = chosen.backward();
      EXPECT_EQ(backward.reduce_scatters, sent(kBlocks + 1)) << step;
      EXPECT_EQ(backward.all_gathers, sent(kBlocks - 1)) << step;
      expect_same(backward, by_hand.backward());
    }
  });
}

TEST_P(AutoShard, HasTheUnshardedNumbers) {
  const auto shard = [](Module& module, const DeviceMesh& mesh) {
    auto_shard(module, by_any({by_type<Block>(), by_size(50)}), mesh);
  };
  expect_parity(
      world(), [] { return decoder_model(6, 2); }, shard, "auto_shard");
}

TEST_P(AutoShard, GivesEveryUnitTheOptionsOfTheRoot) {
  on_ranks([&](const DeviceMesh& mesh) {
    MeasuredBlocks kept(mesh, [&](Decoder& model) {
      auto_shard(model, by_type<Block>(), mesh,
                 {.reshard_after_forward = false, .mp_policy = {.param_dtype = torch::kBFloat16}});
    });
    kept.forward();
    EXPECT_EQ(kept.backward().all_gathers, 0);
    for (const auto& block : kept.model->blocks)
      EXPECT_EQ(block->up->weight.scalar_type(), torch::kBFloat16);
    EXPECT_EQ(kept.model->head->weight.scalar_type(), torch::kBFloat16);
  });
}

TEST_P(AutoShard, ByFnMayGiveOneUnitOtherOptions) {
  on_ranks([&](const DeviceMesh& mesh) {
    MeasuredBlocks decoder(mesh, [&](Decoder& model) {
      const auto second = model->blocks[1].get();
      const auto keep_the_second =
          [second](Module& module, FullyShardOptions options) -> std::optional<FullyShardOptions> {
        if (module.as<Block>() == nullptr) return std::nullopt;
        if (&module == second) options.reshard_after_forward = false;
        return options;
      };
      auto_shard(model, by_fn(keep_the_second), mesh);
    });
    EXPECT_EQ(fsdp_modules(*decoder.model).size(), kBlocks + 1u);
    decoder.forward();
    // The last one stays, as it is first in backward.
    const std::vector<int64_t> gathers = {sent(1), 0, sent(1), 0};
    for (size_t i = 0; i < gathers.size(); ++i)
      EXPECT_EQ(decoder.gathers_of_block(i), gathers[i]) << i;
  });
}

TEST_P(AutoShard, TheFirstOfSeveralPoliciesThatChoosesGivesTheOptions) {
  on_ranks([&](const DeviceMesh& mesh) {
    Pair model;
    const auto with = [](at::ScalarType dtype) {
      return by_fn(
          [dtype](Module& module, FullyShardOptions options) -> std::optional<FullyShardOptions> {
            options.mp_policy.param_dtype = dtype;
            return module.as<Linear>() ? std::optional(options) : std::nullopt;
          });
    };
    auto_shard(model, by_any({exactly({}), with(torch::kBFloat16), with(torch::kHalf)}), mesh);
    EXPECT_EQ(model->first->weight.scalar_type(), torch::kBFloat16);
    EXPECT_EQ(model->second->weight.scalar_type(), torch::kBFloat16);
  });
}

TEST_P(AutoShard, MakesUnitsInPostOrderAsPlannedAndPlanningMakesNone) {
  on_ranks([](const DeviceMesh& mesh) {
    const auto root =
        stage({{"b", stage({{"c", linear(2, 2)}, {"d", linear(2, 2)}})}, {"a", linear(2, 2)}});
    const auto plan = plan_units(root, every_module());
    EXPECT_THAT(paths(plan), ElementsAre("b.c", "b.d", "b", "a", ""));
    EXPECT_THAT(fsdp_modules(*root), IsEmpty());
    for (const auto& parameter : root->parameters()) EXPECT_FALSE(is_dtensor(parameter));
    EXPECT_EQ(plan_units(root, every_module()), plan);

    auto_shard(root, every_module(), mesh);
    auto units = fsdp_modules(*root);
    std::sort(units.begin(), units.end(), [](const FSDPModule& a, const FSDPModule& b) {
      return internal::unit_of(a)->id < internal::unit_of(b)->id;
    });
    EXPECT_EQ(names(units), paths(plan));
  });
}

TEST_P(AutoShard, LeavesWhatTheRootIgnoresPlainInUnitsWithOtherOptionsToo) {
  on_ranks([](const DeviceMesh& mesh) {
    Pair model;
    const auto own_options =
        by_fn([](Module& module, FullyShardOptions) -> std::optional<FullyShardOptions> {
          return module.as<Linear>() ? std::optional(FullyShardOptions()) : std::nullopt;
        });
    const std::vector<at::Tensor> ignored = {model->first->weight, model->second->weight,
                                             model->second->bias};
    EXPECT_EQ(plan_units(model, own_options, {.ignored_params = ignored}).units[0].numel, 4);
    auto_shard(model, own_options, mesh, {.ignored_params = ignored});
    EXPECT_FALSE(is_dtensor(model->first->parameters()[0]));
    EXPECT_TRUE(is_dtensor(model->first->parameters()[1]));
    EXPECT_FALSE(is_dtensor(model->second->parameters()[0]));
    EXPECT_TRUE(is_fsdp_module(*model->first));
    EXPECT_FALSE(is_fsdp_module(*model->second)) << "all of it is ignored";
  });
}

TEST_P(AutoShard, KeepsTiesAcrossUnits) {
  on_ranks([](const DeviceMesh& mesh) {
    const auto tied = torch::ones({8});
    const auto first = stage({}), second = stage({});
    for (const auto& module : {first, second}) module->register_parameter("weight", tied);
    const auto root = stage({{"first", first}, {"second", second}});
    auto_shard(root, exactly({first, second}), mesh);
    EXPECT_TRUE(is_dtensor(first->parameters()[0]));
    EXPECT_TRUE(first->parameters()[0].is_same(second->parameters()[0]));
  });
}

TEST_P(AutoShard, MakesASharedModuleOneUnitAndRefusesItInTwoAsFullyShardDoes) {
  on_ranks([](const DeviceMesh& mesh) {
    const auto shared = linear(2, 2);
    const auto a = stage({{"s", shared}}), b = stage({{"s", shared}});
    const auto root = stage({{"a", a}, {"b", b}});
    expect_error<c10::ValueError>(
        [&] {
          auto_shard(root, exactly({a, b}), mesh);
        },
        HasSubstr("in unit 'a' and in unit 'b'"));
    EXPECT_THAT(fsdp_modules(*root), IsEmpty());
    auto_shard(root, exactly({shared, a, b}), mesh);
    EXPECT_THAT(names(fsdp_modules(*root)), ElementsAre("", "a", "a.s", "b"));

    const auto other = linear(2, 2);
    const auto c = stage({{"s", other}}), d = stage({{"s", other}});
    fully_shard(c, mesh);
    expect_error<c10::ValueError>([&] { fully_shard(d, mesh); }, HasSubstr("'s.weight'"));
  });
}

void expect_untouched(Module& root) {
  EXPECT_THAT(fsdp_modules(root), IsEmpty());
  for (const auto& parameter : root.parameters()) EXPECT_FALSE(is_dtensor(parameter));
}

TEST_P(AutoShard, RefusesATreeWithAUnitByNameAndChangesNothing) {
  on_ranks([](const DeviceMesh& mesh) {
    Pair model;
    fully_shard(model->second, mesh);
    expect_error<c10::ValueError>(
        [&] { auto_shard(model, by_type<Linear>(), mesh); },
        AllOf(HasSubstr("auto_shard: module 'second' (torch::nn::LinearImpl) is a unit already"),
              HasSubstr("rank " + std::to_string(mesh.rank()))));
    expect_untouched(*model->first);
    EXPECT_FALSE(is_fsdp_module(*model));
    fully_shard(model, mesh);
    expect_error<c10::ValueError>([&] { auto_shard(model, by_type<Linear>(), mesh); },
                                  HasSubstr("module '(root)'"));
  });
}

TEST_P(AutoShard, ChecksAllUnitsBeforeTheFirstIsMade) {
  on_ranks([&](const DeviceMesh& mesh) {
    Pair model;
    const auto shard = [&](const FullyShardOptions& options) {
      auto_shard(model, by_type<Linear>(), mesh, options);
    };
    const auto too_many = ReshardAfterForward::to_world(world() + 1);
    expect_error<c10::ValueError>([&] { shard({.reshard_after_forward = too_many}); },
                                  HasSubstr("auto_shard: ReshardAfterForward::to_world("));
    expect_untouched(*model);
    expect_error<c10::ValueError>([&] { shard({.ignored_params = {torch::ones({2})}}); },
                                  HasSubstr("ignored_params[0]"));
    expect_untouched(*model);
    model->second->register_parameter("scalar", torch::ones({}));
    expect_error<c10::ValueError>(
        [&] { shard({}); },
        AllOf(HasSubstr("parameter 'scalar'"), HasSubstr("is a scalar"),
              HasSubstr("auto_shard would make module 'second' (torch::nn::LinearImpl) a unit")));
    expect_untouched(*model);
    EXPECT_NO_THROW(shard({.ignored_params = {model->second->named_parameters()["scalar"]}}));
    expect_error<c10::ValueError>(
        [&] { auto_shard(std::shared_ptr<Stage>(), every_module(), mesh); },
        HasSubstr("auto_shard: the module is null"));
  });
}

// What a deeper unit's own options ignore is nothing for the units around it to refuse.
TEST_P(AutoShard, WhatOneUnitIgnoresTheUnitsAroundItDoNotTake) {
  on_ranks([](const DeviceMesh& mesh) {
    Pair model;
    model->second->register_parameter("scalar", torch::ones({}));
    const auto without_scalars =
        by_fn([](Module& module, FullyShardOptions options) -> std::optional<FullyShardOptions> {
          if (module.as<Linear>() == nullptr) return std::nullopt;
          for (const auto& parameter : module.parameters()) {
            if (parameter.dim() == 0) options.ignored_params.push_back(parameter);
          }
          return options;
        });
    EXPECT_THAT(numels(model.ptr(), without_scalars), ElementsAre(20, 20, 0));
    auto_shard(model, without_scalars, mesh);
    EXPECT_FALSE(is_dtensor(model->second->named_parameters()["scalar"]));
    EXPECT_NO_THROW(model(torch::ones({2, 4})).sum().backward());
  });
}

INSTANTIATE_WORLDS(AutoShard, 1, 2);

TEST(AutoShardHybrid, AllUnitsHaveTheRootsTwoGroups) {
  on_ranks_of(4, [](int64_t, const DeviceMesh&) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
    MeasuredBlocks decoder(mesh,
                           [&](Decoder& model) { auto_shard(model, by_type<Block>(), mesh); });
    for (const auto& parameter : decoder.model->parameters()) {
      const DTensor entry(parameter);
      EXPECT_EQ(entry.device_mesh().group(0), mesh.group(0));
      EXPECT_EQ(entry.device_mesh().group(1), mesh.group(1));
      EXPECT_EQ(entry.placements(), (std::vector<Placement>{Replicate{}, Shard{0}}));
    }
    decoder.forward();
    const auto backward = decoder.backward();
    EXPECT_EQ(backward.reduce_scatters, kBlocks + 1);
    EXPECT_EQ(backward.all_reduces, kBlocks + 1);
  });
}

}  // namespace
}  // namespace fsdp::testing
