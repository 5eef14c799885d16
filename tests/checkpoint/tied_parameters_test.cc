// Tied parameters, which LibTorch's parameters() lists once for each of their names.
#include "checkpoint/checkpoint.h"
#include "checkpoint/optimizer_state_dict.h"
#include "checkpoint/state_dict.h"
#include "device_mesh/process_group.h"
#include "fully_shard/fully_shard.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/thread_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

enum class Naming { kTableFirst, kHeadFirst, kUntied };

struct HeadImpl : torch::nn::Module {
  explicit HeadImpl(const torch::Tensor& value) : weight(register_parameter("weight", value)) {}
  torch::Tensor weight;
};
TORCH_MODULE(Head);

// A table of five rows whose values the head reads again.
struct TiedModelImpl : torch::nn::Module {
  explicit TiedModelImpl(Naming names = Naming::kTableFirst)
      : head(torch::full({5, 4}, 0.5)),
        table(names == Naming::kUntied ? torch::full({5, 4}, 0.5) : head->weight),
        body(4, 4) {
    if (names == Naming::kHeadFirst) {
      // A module's own parameters come before those of the modules below it.
      register_module("head", head);
      outer = register_module("outer", std::make_shared<torch::nn::Module>("Outer"));
      outer->register_parameter("table", table);
    } else {
      outer = register_module("outer", std::make_shared<torch::nn::Module>("Outer"));
      table = outer->register_parameter("table", table);
      register_module("head", head);
    }
    register_module("body", body);
  }
  torch::Tensor forward(const torch::Tensor& rows) {
    const auto x = body(torch::embedding(table, rows));
    return torch::matmul(x.tanh(), head->weight.t());
  }
  Head head;
  torch::Tensor table;
  torch::nn::Linear body;
  std::shared_ptr<torch::nn::Module> outer;
};
TORCH_MODULE(TiedModel);

enum class Groups { kOne, kTwo };

// With two groups the table is in both, under one name in each.
std::unique_ptr<AdamW> optimizer_over(torch::nn::Module& model, Groups groups, double lr) {
  if (groups == Groups::kOne) return std::make_unique<AdamW>(model.parameters(), AdamWOptions(lr));
  const auto all = model.named_parameters();
  const auto group = [&](std::vector<std::string> names, double its_lr) {
    std::vector<torch::Tensor> params;
    for (const auto& name : names) params.push_back(all[name]);
    return torch::optim::OptimizerParamGroup(params, std::make_unique<AdamWOptions>(its_lr));
  };
  return std::make_unique<AdamW>(std::vector{group({"outer.table", "body.weight"}, lr),
                                             group({"head.weight", "body.bias"}, lr / 4)},
                                 AdamWOptions(lr));
}

struct TiedRun {
  TiedRun(int64_t world, Groups groups, double lr, Naming names = Naming::kTableFirst)
      : model(names) {
    torch::NoGradGuard no_grad;
    model->body->weight.copy_(torch::eye(4) * 0.3);
    model->body->bias.fill_(0.1);
    model->head->weight.copy_(torch::arange(20, torch::kFloat).view({5, 4}) / 20);
    if (names == Naming::kUntied) model->table.copy_(model->head->weight);
    if (world > 0) fully_shard(model, init_device_mesh(torch::kCPU, {world}));
    optimizer = optimizer_over(*model, groups, lr);
  }
  void step() {
    optimizer->zero_grad();
    model->forward(torch::arange(5)).pow(2).mean().backward();
    optimizer->step();
  }
  std::vector<double> learning_rates() const {
    std::vector<double> rates;
    for (auto& group : optimizer->param_groups()) rates.push_back(group.options().get_lr());
    return rates;
  }
  TiedModel model;
  std::unique_ptr<AdamW> optimizer;
};

void expect_same_values(TiedRun& a, TiedRun& b) {
  const auto want = a.model->named_parameters();
  for (const auto& item : b.model->named_parameters()) {
    EXPECT_TRUE(torch::equal(full_value(item.value()), full_value(want[item.key()]))) << item.key();
  }
}

// `carry` brings the state of a run of two steps into a fresh one, which steps on alike.
void expect_continues(int64_t world, Groups groups,
                      const std::function<void(TiedRun& from, TiedRun& to)>& carry) {
  TiedRun from(world, groups, 0.1), to(world, groups, 0.7);
  from.step();
  from.step();
  carry(from, to);
  EXPECT_EQ(to.learning_rates(), from.learning_rates());
  from.step();
  to.step();
  expect_same_values(from, to);
}

// World 0 is a plain model without a process group.
void on_worlds(const std::function<void(int64_t world, Groups groups)>& body) {
  for (const Groups groups : {Groups::kOne, Groups::kTwo}) {
    body(0, groups);
    for (const int64_t world : {1, 2, 4}) {
      run_ranks(world, [&](int64_t) { body(world, groups); });
    }
  }
}

TEST(Ties, AnOptimizerThatListsATiedParameterTwiceIsSavedAndLoaded) {
  for (const Groups groups : {Groups::kOne, Groups::kTwo}) {
    for (const int64_t world : {0, 1, 2, 4}) {
      TemporaryFolder folder(memory_folder());
      const auto body = [&](int64_t = 0) {
        expect_continues(world, groups, [&](TiedRun& from, TiedRun& to) {
          save({.model = from.model, .optimizer = *from.optimizer}, folder / "saved");
          load({.model = to.model, .optimizer = *to.optimizer}, folder / "saved");
        });
      };
      world == 0 ? body() : run_ranks(world, body);
    }
  }
}

TEST(Ties, AnOptimizerThatListsATiedParameterTwiceGoesThroughEveryStateDict) {
  const std::vector<std::pair<StateDictOptions, StateDictOptions>> forms = {
      {{}, {}},
      {{.full_state_dict = true}, {.full_state_dict = true}},
      {{.full_state_dict = true, .cpu_offload = true},
       {.full_state_dict = true, .broadcast_from_rank0 = true}},
      {{.local = true}, {.local = true}}};
  on_worlds([&](int64_t world, Groups groups) {
    for (const auto& [get, set] : forms) {
      expect_continues(world, groups, [&](TiedRun& from, TiedRun& to) {
        set_model_state_dict(*to.model, get_model_state_dict(*from.model, get), set);
        const auto dict = get_optimizer_state_dict(*from.model, *from.optimizer, get);
        set_optimizer_state_dict(*to.model, *to.optimizer, dict, set);
      });
    }
  });
}

// As Python's optimizer of model.parameters(), which has a tied parameter once.
TEST(Ties, ATiedParameterHasOneNumberAndIsListedOnceInAGroup) {
  on_worlds([](int64_t world, Groups groups) {
    expect_continues(world, groups, [&](TiedRun& from, TiedRun& to) {
      set_model_state_dict(*to.model, get_model_state_dict(*from.model));
      const auto dict = get_optimizer_state_dict(*from.model, *from.optimizer);
      const auto by_id = rekey(dict, KeyType::kId, *from.model, *from.optimizer);
      EXPECT_EQ(dict.state.size(), 3u);
      if (groups == Groups::kOne) {
        EXPECT_THAT(dict.param_groups[0].params,
                    ElementsAre("outer.table", "body.weight", "body.bias"));
        EXPECT_THAT(by_id.param_groups[0].params, ElementsAre("0", "1", "2"));
      } else {
        EXPECT_THAT(dict.param_groups[1].params, ElementsAre("outer.table", "body.bias"));
        EXPECT_THAT(by_id.param_groups[0].params, ElementsAre("0", "1"));
        EXPECT_THAT(by_id.param_groups[1].params, ElementsAre("0", "2"));
      }
      const auto again = rekey(by_id, KeyType::kName, *to.model, *to.optimizer);
      set_optimizer_state_dict(*to.model, *to.optimizer, again);
    });
  });
}

TEST(Ties, FlattenedStateOfATiedParameterComesBackUnlessItsGroupsDiffer) {
  expect_continues(0, Groups::kOne, [](TiedRun& from, TiedRun& to) {
    set_model_state_dict(*to.model, get_model_state_dict(*from.model));
    const auto flat = flatten(get_optimizer_state_dict(*from.model, *from.optimizer));
    set_optimizer_state_dict(*to.model, *to.optimizer, unflatten(flat, *to.model, *to.optimizer));
  });
  TiedRun two(0, Groups::kTwo, 0.1);
  EXPECT_THAT(message_of<c10::ValueError>(
                  [&] { flatten(get_optimizer_state_dict(*two.model, *two.optimizer)); }),
              AllOf(HasSubstr("outer.table"), HasSubstr("in two groups")));
}

TEST(Ties, StateIsFoundUnderAnyNameOfATiedParameter) {
  TemporaryFolder folder;
  run_ranks(2, [&](int64_t) {
    TiedRun from(2, Groups::kOne, 0.1), to(2, Groups::kOne, 0.7, Naming::kHeadFirst);
    TiedRun other(2, Groups::kOne, 0.7, Naming::kHeadFirst);
    EXPECT_EQ(to.model->named_parameters().keys().front(), "head.weight");
    from.step();
    save({.model = from.model, .optimizer = *from.optimizer}, folder / "saved");
    load({.model = to.model, .optimizer = *to.optimizer}, folder / "saved");
    set_model_state_dict(*other.model, get_model_state_dict(*from.model));
    set_optimizer_state_dict(*other.model, *other.optimizer,
                             get_optimizer_state_dict(*from.model, *from.optimizer));
    for (TiedRun* const each : {&from, &to, &other}) each->step();
    expect_same_values(from, to);
    expect_same_values(from, other);
  });
}

TEST(Ties, AFileOrDictWithDifferentValuesUnderTheNamesOfATieIsRefused) {
  TemporaryFolder folder;
  const auto different = AllOf(HasSubstr("'outer.table' and 'head.weight' are one tensor in the "),
                               HasSubstr("different values under these names"));
  run_ranks(2, [&](int64_t) {
    TiedRun untied(2, Groups::kOne, 0.1, Naming::kUntied), tied(2, Groups::kOne, 0.1);
    save({.model = untied.model}, folder / "same");
    const auto same = get_model_state_dict(*untied.model, {.full_state_dict = true});
    untied.step();
    save({.model = untied.model}, folder / "different");
    const auto values = get_model_state_dict(*untied.model, {.full_state_dict = true});
    tied.step();
    const auto before = full_value(tied.model->named_parameters()["outer.table"]).clone();
    const auto table = [&] { return full_value(tied.model->named_parameters()["outer.table"]); };
    for (const bool strict : {true, false}) {
      expect_error<c10::ValueError>(
          [&] { load({.model = tied.model}, folder / "different", {.strict = strict}); },
          different);
      expect_error<c10::ValueError>(
          [&] { set_model_state_dict(*tied.model, values, {.strict = strict}); }, different);
      EXPECT_TRUE(torch::equal(table(), before));
    }
    load({.model = tied.model}, folder / "same");
    EXPECT_TRUE(torch::equal(table(), same["head.weight"]));
    set_model_state_dict(*tied.model, same);
    LoadOptions one_name{.strict = false};
    one_name.name_in_file = [](const std::string& name) {
      return name == "outer.table" ? "head.weight" : name;
    };
    load({.model = tied.model}, folder / "different", one_name);
    EXPECT_TRUE(torch::equal(table(), values["head.weight"]));
  });
}

}  // namespace
}  // namespace fsdp::testing
