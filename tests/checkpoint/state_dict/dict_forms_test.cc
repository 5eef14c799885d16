// State dicts: what their forms hold, how optimizers' dicts are keyed, and what is one
// rank's own.
#include "checkpoint/optimizer_state_dict.h"
#include "checkpoint/state_dict.h"
#include "device_mesh/process_group.h"
#include "tests/checkpoint/small_model.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using AdamW = torch::optim::AdamW;

void step_once(SmallModel& model, torch::optim::Optimizer& optimizer) {
  model->eval();
  model->forward(torch::ones({4, 5})).pow(2).mean().backward();
  optimizer.step();
}

at::Tensor tensor_of(const OptimizerStateDict& dict, const std::string& name,
                     const std::string& field) {
  return dict.state.at(name).at(field).toTensor();
}

TEST(DictForms, LocalPartsSendNothingAndRefuseAnotherWorld) {
  StateDict kept;
  run_ranks(3, [&](int64_t rank) {
    SmallModel model;
    shard_small_model(model, init_device_mesh(torch::kCPU, {3}));
    const auto before = default_process_group()->getSequenceNumberForGroup();
    const auto values = get_model_state_dict(*model, {.local = true});
    EXPECT_EQ(default_process_group()->getSequenceNumberForGroup(), before);
    if (rank == 0) kept = values;
  });
  run_ranks(2, [&](int64_t) {
    SmallModel model;
    shard_small_model(model, init_device_mesh(torch::kCPU, {2}));
    EXPECT_THAT(message_of([&] { set_model_state_dict(*model, kept, {.local = true}); }),
                HasSubstr("has shape"));
  });
}

TEST(DictForms, OfAModelOnAMeshOfOneRankAllHoldWholeValues) {
  run_ranks(1, [](int64_t) {
    SmallModel model;
    shard_small_model(model, init_device_mesh(torch::kCPU, {1}));
    fill(*model, 3);
    SmallModel plain;
    fill(*plain, 3);
    const auto& expected = plain->first->weight;
    const auto full = get_model_state_dict(*model, {.full_state_dict = true});
    const auto local = get_model_state_dict(*model, {.local = true});
    const auto distributed = get_model_state_dict(*model);
    EXPECT_TRUE(torch::equal(full["first.weight"], expected));
    EXPECT_TRUE(torch::equal(local["first.weight"], expected));
    EXPECT_TRUE(torch::equal(full_value(distributed["first.weight"]), expected));
  });
}

TEST(DictForms, WithoutStrictWhatTheDictLacksKeepsItsValue) {
  run_ranks(2, [](int64_t) {
    SmallModel model, other;
    const auto mesh = init_device_mesh(torch::kCPU, {2});
    shard_small_model(model, mesh);
    fill(*model, 1);
    fill(*other, 2);
    StateDict values;
    values.insert("first.bias", other->first->bias.detach());
    EXPECT_THAT(message_of([&] { set_model_state_dict(*model, values); }),
                HasSubstr("missing in the dict: frozen, unused, first.weight"));
    const auto loaded = set_model_state_dict(*model, values, {.strict = false});
    EXPECT_EQ(loaded.missing.front(), "frozen");
    const auto now = full_values(*model);
    EXPECT_TRUE(torch::equal(now["first.bias"], other->first->bias));
    fill(*other, 1);
    EXPECT_TRUE(torch::equal(now["first.weight"], other->first->weight));
  });
}

TEST(OptimizerDictForms, TheFullOneIsThatOfUnshardedTraining) {
  SmallModel plain;
  fill(*plain, 1);
  AdamW plain_optimizer(plain->parameters(), 1e-2);
  step_once(plain, plain_optimizer);
  const auto expected = get_optimizer_state_dict(*plain, plain_optimizer);
  run_ranks(2, [&](int64_t) {
    SmallModel model;
    shard_small_model(model, init_device_mesh(torch::kCPU, {2}));
    fill(*model, 1);
    AdamW optimizer(model->parameters(), 1e-2);
    step_once(model, optimizer);
    const auto full = get_optimizer_state_dict(*model, optimizer, {.full_state_dict = true});
    ASSERT_EQ(full.state.size(), expected.state.size());
    for (const auto& [name, fields] : expected.state) {
      for (const std::string field : {"exp_avg", "exp_avg_sq"}) {
        EXPECT_TRUE(torch::equal(tensor_of(full, name, field), tensor_of(expected, name, field)))
            << name << " " << field;
      }
      EXPECT_EQ(full.state.at(name).at("step"), fields.at("step"));
    }
    EXPECT_TRUE(full.uncollected.empty());
  });
}

TEST(OptimizerDictForms, StateLiesAsItsParameterDoesAndNumbersAreNumbers) {
  run_ranks(2, [](int64_t) {
    SmallModel model;
    shard_small_model(model, init_device_mesh(torch::kCPU, {2}));
    fill(*model, 1);
    AdamW optimizer(model->parameters(), 1e-2);
    step_once(model, optimizer);
    const auto dict = get_optimizer_state_dict(*model, optimizer);
    for (const auto& [name, fields] : dict.state) {
      const DTensor average(fields.at("exp_avg").toTensor());
      const DTensor parameter(model->named_parameters()[name]);
      EXPECT_EQ(average.placements(), parameter.placements()) << name;
      EXPECT_EQ(average.to_local().sizes(), parameter.to_local().sizes()) << name;
      EXPECT_EQ(fields.at("step").toInt(), 1) << name;
    }
  });
}

TEST(OptimizerDictForms, StateOfNobodyIsAnErrorOrReported) {
  SmallModel model;
  SGD optimizer(model->parameters(), SGDOptions(0.1).momentum(0.9));
  auto dict = get_optimizer_state_dict(*model, optimizer);
  dict.state["nobody"]["momentum_buffer"] = torch::ones({2});
  EXPECT_THAT(message_of([&] { set_optimizer_state_dict(*model, optimizer, dict); }),
              HasSubstr("in the dict only: nobody"));
  EXPECT_TRUE(optimizer.state().empty());
  const auto loaded = set_optimizer_state_dict(*model, optimizer, dict, {.strict = false});
  EXPECT_EQ(loaded.unexpected, std::vector<std::string>{"nobody"});
}

struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    in = register_parameter("in", torch::ones({2}));
    out = register_parameter("out", in);
    other = register_parameter("other", torch::ones({3}));
  }
  torch::Tensor in, out, other;
};
TORCH_MODULE(Tied);

TEST(OptimizerDictForms, RekeyingDropsWhatTheOptimizerLacksAndKnowsTies) {
  Tied model;
  SGD all(model->parameters(), SGDOptions(0.1)), some({model->other}, SGDOptions(0.1));
  OptimizerStateDict dict;
  dict.state["out"]["momentum_buffer"] = torch::full({2}, 5);
  dict.state["other"]["momentum_buffer"] = torch::full({3}, 6);
  const auto ids = rekey(dict, KeyType::kId, *model, all);
  EXPECT_EQ(tensor_of(ids, "0", "momentum_buffer")[0].item<int64_t>(), 5);
  EXPECT_EQ(ids.state.size(), 2u);
  const auto fewer = rekey(dict, KeyType::kId, *model, some);
  EXPECT_EQ(fewer.state.size(), 1u);
  EXPECT_EQ(tensor_of(fewer, "0", "momentum_buffer")[0].item<int64_t>(), 6);
  const auto same = rekey(dict, KeyType::kName, *model, some);  // already so: nothing is dropped
  EXPECT_TRUE(
      tensor_of(same, "out", "momentum_buffer").is_same(tensor_of(dict, "out", "momentum_buffer")));
}

// As distributed nothing is sent, so what is erased there is never gathered.
TEST(OptimizerDictForms, WhatIsErasedAsDistributedIsLeftOutOfWhatIsCollected) {
  run_ranks(2, [](int64_t) {
    SmallModel model;
    shard_small_model(model, init_device_mesh(torch::kCPU, {2}));
    fill(*model, 1);
    AdamW optimizer(model->parameters(), 0.1);
    step_once(model, optimizer);
    const auto whole = get_optimizer_state_dict(*model, optimizer, {.full_state_dict = true});
    auto dict = get_optimizer_state_dict(*model, optimizer);
    std::erase_if(dict.state, [](const auto& item) { return item.first.starts_with("first."); });
    EXPECT_FALSE(dict.state.empty());
    EXPECT_LT(dict.state.size(), whole.state.size());
    for (auto& [name, fields] : dict.state) {
      const auto collected = full_tensor(fields.at("exp_avg").toTensor());
      EXPECT_TRUE(torch::equal(collected, tensor_of(whole, name, "exp_avg"))) << name;
    }
  });
}

// Every rank has an expert of its own, on a mesh of one rank.
struct WithExpertImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return expert(torch::tanh(dense(x))); }
  torch::nn::Linear dense = register_module("dense", torch::nn::Linear(3, 3));
  torch::nn::Linear expert = register_module("expert", torch::nn::Linear(3, 3));
};
TORCH_MODULE(WithExpert);

WithExpert with_expert_over(int64_t expert_ranks) {
  WithExpert model;
  for (auto& parameter : model->parameters()) torch::nn::init::constant_(parameter, 0.1);
  const int64_t world = default_process_group()->getSize();
  const auto meshes =
      init_device_mesh(torch::kCPU, {world / expert_ranks, expert_ranks}, {"experts", "own"});
  fully_shard(model->expert, meshes["own"]);
  fully_shard(model, init_device_mesh(torch::kCPU, {world}));
  return model;
}

struct ExpertTraining {
  explicit ExpertTraining(int64_t expert_ranks = 1) : model(with_expert_over(expert_ranks)) {}
  void step() {
    optimizer.zero_grad();
    const auto rank = default_process_group()->getRank();
    model->forward(torch::full({2, 3}, 0.5 * (rank + 1))).pow(2).sum().backward();
    optimizer.step();
  }
  WithExpert model;
  AdamW optimizer{model->parameters(), 1e-2};
};

TEST(ExpertDicts, AnExpertsStateIsEachRanksOwnIsListedAndComesBack) {
  std::map<int64_t, at::Tensor> averages;
  std::mutex mutex;
  run_ranks(2, [&](int64_t rank) {
    ExpertTraining from, to;
    from.step();
    to.step();
    const auto dict = get_optimizer_state_dict(*from.model, from.optimizer,
                                               {.full_state_dict = true, .cpu_offload = true});
    EXPECT_EQ(dict.uncollected, (std::vector<std::string>{"expert.weight", "expert.bias"}));
    EXPECT_EQ(dict.state.count("dense.weight"), rank == 0 ? 1u : 0u);
    {
      const std::lock_guard lock(mutex);
      averages[rank] = tensor_of(dict, "expert.weight", "exp_avg").clone();
    }
    set_model_state_dict(*to.model, get_model_state_dict(*from.model, {.local = true}),
                         {.local = true});
    set_optimizer_state_dict(*to.model, to.optimizer, dict,
                             {.full_state_dict = true, .broadcast_from_rank0 = true});
    from.step();
    to.step();
    const auto want = get_model_state_dict(*from.model, {.local = true});
    for (const auto& item : get_model_state_dict(*to.model, {.local = true})) {
      EXPECT_TRUE(torch::equal(item.value(), want[item.key()])) << rank << " " << item.key();
    }
  });
  EXPECT_FALSE(torch::equal(averages.at(0), averages.at(1)));
}

TEST(ExpertDicts, WhatSeveralRanksShareOrAWorldOfOneHoldsIsCollected) {
  for (const auto& [world, expert_ranks] : {std::pair{4, 2}, std::pair{1, 1}}) {
    run_ranks(world, [&, expert_ranks = expert_ranks](int64_t) {
      ExpertTraining training(expert_ranks);
      training.step();
      const auto dict =
          get_optimizer_state_dict(*training.model, training.optimizer, {.full_state_dict = true});
      EXPECT_TRUE(dict.uncollected.empty());
      EXPECT_EQ(tensor_of(dict, "expert.weight", "exp_avg").sizes(), (std::vector<int64_t>{3, 3}));
    });
  }
}

// Whether the mesh is that of the whole model does not matter.
TEST(ExpertDicts, AWholeModelOnAMeshOfOneRankInALargerWorldIsEachRanksOwn) {
  run_ranks(2, [](int64_t) {
    const auto own = init_device_mesh(torch::kCPU, {2, 1}, {"models", "own"})["own"];
    torch::nn::Linear model(3, 3);
    fully_shard(model, own);
    AdamW optimizer(model->parameters(), 1e-2);
    model->forward(torch::ones({2, 3})).sum().backward();
    optimizer.step();
    const auto dict = get_optimizer_state_dict(*model, optimizer, {.full_state_dict = true});
    EXPECT_EQ(dict.uncollected, (std::vector<std::string>{"weight", "bias"}));
    EXPECT_EQ(tensor_of(dict, "weight", "exp_avg").sizes(), (std::vector<int64_t>{3, 3}));
  });
}

}  // namespace
}  // namespace fsdp::testing
