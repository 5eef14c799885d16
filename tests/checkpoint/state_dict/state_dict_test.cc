// State dicts in memory: models and optimizers, as distributed, whole, local, sent.
#include "checkpoint/state_dict.h"

#include "checkpoint/optimizer_state_dict.h"
#include "device_mesh/process_group.h"
#include "tests/checkpoint/small_model.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

void expect_equal(torch::nn::Module& model, int64_t seed) {
  SmallModel expected;
  fill(*expected, seed);
  const auto want = full_values(*expected);
  for (const auto& item : full_values(model)) {
    EXPECT_TRUE(torch::equal(item.value(), want[item.key()])) << item.key();
  }
}

struct Sharded {
  explicit Sharded(int64_t world, int64_t seed) {
    shard_small_model(model, init_device_mesh(torch::kCPU, {world}));
    fill(*model, seed);
    optimizer = std::make_unique<AdamW>(model->parameters(), AdamWOptions(1e-2));
  }
  void step() {
    optimizer->zero_grad();
    model->eval();
    model->forward(torch::ones({4, 5})).pow(2).mean().backward();
    optimizer->step();
  }
  SmallModel model;
  std::unique_ptr<AdamW> optimizer;
};

TEST(ModelStateDict, AsDistributedSharesMemoryAndSendsNothing) {
  run_ranks(3, [](int64_t) {
    Sharded a(3, 1), b(3, 2);
    const auto values = get_model_state_dict(*a.model);
    EXPECT_EQ(values.size(), full_values(*a.model).size());
    const auto mine = DTensor(a.model->named_parameters()["first.weight"]).to_local();
    EXPECT_EQ(DTensor(values["first.weight"]).to_local().const_data_ptr(), mine.const_data_ptr());
    const auto loaded = set_model_state_dict(*b.model, values);
    EXPECT_TRUE(loaded.missing.empty() && loaded.unexpected.empty());
    expect_equal(*b.model, 1);
  });
}

TEST(ModelStateDict, FullValuesAreCopiesThatAnyWorldTakesItsPartOf) {
  StateDict kept;
  run_ranks(2, [&](int64_t rank) {
    Sharded a(2, 1);
    const auto values = get_model_state_dict(*a.model, {.full_state_dict = true});
    EXPECT_EQ(values["first.weight"].sizes(), (std::vector<int64_t>{7, 5}));
    if (rank == 0) kept = values;
    values["frozen"].fill_(-5);
    expect_equal(*a.model, 1);
    values["frozen"].copy_(full_value(a.model->named_parameters()["frozen"]));
  });
  run_ranks(3, [&](int64_t) {
    Sharded b(3, 4);
    set_model_state_dict(*b.model, kept, {.full_state_dict = true});
    expect_equal(*b.model, 1);
  });
}

TEST(ModelStateDict, OnTheHostOnlyRankZeroHasValuesAndBroadcastsThem) {
  run_ranks(3, [](int64_t rank) {
    Sharded a(3, 1), b(3, 2);
    const auto values =
        get_model_state_dict(*a.model, {.full_state_dict = true, .cpu_offload = true});
    EXPECT_EQ(values.is_empty(), rank != 0);
    set_model_state_dict(*b.model, values, {.full_state_dict = true, .broadcast_from_rank0 = true});
    expect_equal(*b.model, 1);
  });
}

TEST(ModelStateDict, LocalPartsComeBackAtTheSameWorld) {
  run_ranks(3, [](int64_t rank) {
    Sharded a(3, 1), b(3, 2);
    const auto values = get_model_state_dict(*a.model, {.local = true});
    const std::vector<int64_t> rows = {3, 3, 1};
    EXPECT_EQ(values["first.weight"].size(0), rows[static_cast<size_t>(rank)]);
    EXPECT_FALSE(is_dtensor(values["first.weight"]));
    set_model_state_dict(*b.model, values, {.local = true});
    expect_equal(*b.model, 1);
  });
}

TEST(ModelStateDict, NamesShapesAndOptionsAreCheckedBeforeAnythingChanges) {
  run_ranks(2, [](int64_t rank) {
    Sharded a(2, 1), b(2, 2);
    auto values = get_model_state_dict(*a.model, {.full_state_dict = true});
    values.insert("other", torch::ones({1}));
    EXPECT_THAT(message_of([&] { set_model_state_dict(*b.model, values); }),
                HasSubstr("in the dict only: other"));
    StateDict wrong;
    for (const auto& item : values) {
      if (item.key() != "other") wrong.insert(item.key(), item.value().to(torch::kDouble));
    }
    EXPECT_THAT(message_of([&] { set_model_state_dict(*b.model, wrong); }),
                HasSubstr("which loses something; convert it first"));
    StateDict none;
    EXPECT_THAT(message_of([&] {
                  set_model_state_dict(*b.model, rank == 0 ? wrong : none,
                                       {.full_state_dict = true, .broadcast_from_rank0 = true});
                }),
                ::testing::ContainsRegex("rank 1: '.*' is Float here and Double in the dict"));
    expect_equal(*b.model, 2);
    EXPECT_THAT(message_of([&] {
                  get_model_state_dict(*a.model, {.full_state_dict = true, .local = true});
                }),
                HasSubstr("exclude each other"));
    EXPECT_THAT(
        message_of([&] { set_model_state_dict(*b.model, none, {.broadcast_from_rank0 = true}); }),
        HasSubstr("needs full_state_dict"));
    const auto loaded = set_model_state_dict(*b.model, values, {.strict = false});
    EXPECT_EQ(loaded.unexpected, std::vector<std::string>{"other"});
    expect_equal(*b.model, 1);
  });
}

TEST(ModelStateDict, FrozenParametersMayBeLeftOut) {
  run_ranks(2, [](int64_t) {
    Sharded a(2, 1), b(2, 2);
    const auto values = get_model_state_dict(*a.model, {.ignore_frozen_params = true});
    EXPECT_FALSE(values.contains("frozen"));
    EXPECT_THAT(message_of([&] { set_model_state_dict(*b.model, values); }),
                HasSubstr("missing in the dict: frozen"));
    set_model_state_dict(*b.model, values, {.ignore_frozen_params = true});
    set_model_state_dict(*a.model, get_model_state_dict(*b.model));
    SmallModel second;
    fill(*second, 2);
    EXPECT_TRUE(torch::equal(full_value(b.model->named_parameters()["frozen"]), second->frozen));
  });
}

// The state of `from` by any form, in an optimizer that steps on as `from` does.
void expect_continues(Sharded& from, Sharded& to, const StateDictOptions& get,
                      const StateDictOptions& set) {
  to.step();  // state that must go
  set_model_state_dict(*to.model, get_model_state_dict(*from.model, get), set);
  set_optimizer_state_dict(*to.model, *to.optimizer,
                           get_optimizer_state_dict(*from.model, *from.optimizer, get), set);
  from.step();
  to.step();
  const auto want = full_values(*from.model);
  for (const auto& item : full_values(*to.model)) {
    EXPECT_TRUE(torch::equal(item.value(), want[item.key()])) << item.key();
  }
}

TEST(OptimizerStateDict, EveryFormContinuesBitEqual) {
  run_ranks(3, [](int64_t) {
    const std::vector<std::pair<StateDictOptions, StateDictOptions>> forms = {
        {{}, {}},
        {{.full_state_dict = true}, {.full_state_dict = true}},
        {{.full_state_dict = true, .cpu_offload = true},
         {.full_state_dict = true, .broadcast_from_rank0 = true}},
        {{.local = true}, {.local = true}}};
    for (const auto& [get, set] : forms) {
      Sharded from(3, 1), to(3, 2);
      from.step();
      expect_continues(from, to, get, set);
    }
    Sharded fresh(3, 1), to(3, 2);  // before the first step
    expect_continues(fresh, to, {}, {});
  });
}

TEST(OptimizerStateDict, GroupsAndMissingParametersAreChecked) {
  run_ranks(2, [](int64_t) {
    Sharded a(2, 1), b(2, 2);
    a.step();
    auto dict = get_optimizer_state_dict(*a.model, *a.optimizer);
    EXPECT_EQ(dict.param_groups.size(), 1u);
    EXPECT_EQ(dict.param_groups[0].options.at("lr").toDouble(), 1e-2);
    EXPECT_EQ(dict.state.count("frozen"), 0u);
    auto& names = dict.param_groups[0].params;
    names.erase(std::find(names.begin(), names.end(), "unused"));
    EXPECT_THAT(message_of([&] { set_optimizer_state_dict(*b.model, *b.optimizer, dict); }),
                HasSubstr("missing in the dict: unused"));
    EXPECT_TRUE(b.optimizer->state().empty());
    dict.param_groups[0].options["lr"] = 0.5;
    set_optimizer_state_dict(*b.model, *b.optimizer, dict, {.strict = false});
    EXPECT_EQ(b.optimizer->param_groups()[0].options().get_lr(), 0.5);
  });
}

TEST(OptimizerStateDict, KeysBecomeNumbersAndNamesAgain) {
  run_ranks(2, [](int64_t) {
    Sharded a(2, 1), b(2, 2);
    a.step();
    const auto dict = get_optimizer_state_dict(*a.model, *a.optimizer, {.full_state_dict = true});
    const auto by_id = rekey(dict, KeyType::kId, *a.model, *a.optimizer);
    std::vector<std::string> numbers;
    for (size_t i = 0; i < dict.param_groups[0].params.size(); ++i)
      numbers.push_back(std::to_string(i));
    EXPECT_EQ(by_id.param_groups[0].params, numbers);
    auto changed = by_id;
    changed.param_groups[0].options["lr"] = 7.0;
    EXPECT_EQ(dict.param_groups[0].options.at("lr").toDouble(), 1e-2) << "the groups are copies";
    EXPECT_EQ(by_id.state.count("first.weight"), 0u);
    EXPECT_THAT(message_of([&] { set_optimizer_state_dict(*b.model, *b.optimizer, by_id); }),
                HasSubstr("rekey() turns numbers into names"));
    const auto again = rekey(by_id, KeyType::kName, *b.model, *b.optimizer);
    EXPECT_TRUE(torch::equal(again.state.at("first.weight").at("exp_avg").toTensor(),
                             dict.state.at("first.weight").at("exp_avg").toTensor()));
    auto mixed = dict;
    mixed.state["3"] = {};
    EXPECT_THAT(message_of([&] { rekey(mixed, KeyType::kId, *a.model, *a.optimizer); }),
                HasSubstr("some are names, some numbers"));
    OptimizerStateDict stranger;
    stranger.state["nobody"] = {};
    EXPECT_THAT(message_of([&] { rekey(stranger, KeyType::kId, *a.model, *a.optimizer); }),
                HasSubstr("'nobody' is no parameter of the model"));
  });
}

TEST(OptimizerStateDict, FlattenedItIsTensorsOnlyAndComesBack) {
  run_ranks(2, [](int64_t) {
    Sharded a(2, 1), b(2, 1);
    a.step();
    const auto dict = get_optimizer_state_dict(*a.model, *a.optimizer);
    auto flat = flatten(dict);
    EXPECT_EQ(flat["state.first.weight.step"].item<int64_t>(), 1);
    EXPECT_EQ(flat["param_groups.first.weight.lr"].item<double>(), 1e-2);
    EXPECT_EQ(flat["param_groups.first.weight.betas"].numel(), 2);
    flat["state.first.weight.step"] = torch::ones({});  // as Python has it
    const auto again = unflatten(flat, *b.model, *b.optimizer);
    EXPECT_EQ(again.state.at("first.weight").at("step").toInt(), 1);
    EXPECT_EQ(again.param_groups[0].options, dict.param_groups[0].options);
    set_optimizer_state_dict(*b.model, *b.optimizer, again);
    EXPECT_EQ(b.optimizer->state().size(), a.optimizer->state().size());
    flat.insert("state.nobody.step", torch::ones({}));
    EXPECT_THAT(message_of([&] { unflatten(flat, *b.model, *b.optimizer); }),
                HasSubstr("'state.nobody.step' is of no parameter here"));
  });
}

}  // namespace
}  // namespace fsdp::testing
