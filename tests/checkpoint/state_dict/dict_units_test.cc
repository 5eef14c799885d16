// State dicts of units of every kind, and when they may be asked for.
#include "checkpoint/optimizer_state_dict.h"
#include "checkpoint/state_dict.h"
#include "fully_shard/fully_shard.h"
#include "tests/checkpoint/small_model.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

const std::vector<StateDictOptions> kForms = {
    {}, {.full_state_dict = true}, {.full_state_dict = true, .cpu_offload = true}, {.local = true}};

TEST(DictUnits, OfAReplicatedUnitEveryFormComesBack) {
  on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    for (const auto& get : kForms) {
      SmallModel from, to;
      for (auto* const model : {&from, &to}) {
        replicate((*model)->first, mesh);
        fully_shard(*model, mesh);
      }
      fill(*from, 1);
      fill(*to, 2);
      StateDictOptions set = get;
      set.cpu_offload = false;
      set.broadcast_from_rank0 = get.cpu_offload;
      const auto values = get_model_state_dict(*from, get);
      if (!get.cpu_offload || rank == 0) {
        EXPECT_EQ(values["first.weight"].sizes(), (std::vector<int64_t>{7, 5}));
      }
      set_model_state_dict(*to, values, set);
      const auto want = full_values(*from);
      for (const auto& item : full_values(*to)) {
        EXPECT_TRUE(torch::equal(item.value(), want[item.key()])) << item.key();
      }
    }
  });
}

TEST(DictUnits, BetweenForwardAndBackwardAResidentModelGivesItsValuesAndGoesOn) {
  on_ranks_of(2, [](const DeviceMesh& mesh) {
    torch::nn::Linear asked(3, 5), alone(3, 5);
    for (auto* const model : {&asked, &alone}) {
      fully_shard(*model, mesh, {.reshard_after_forward = false});
      fill(**model, 3);
    }
    const auto loss = asked->forward(torch::ones({2, 3})).pow(2).mean();
    const auto values = get_model_state_dict(*asked, {.full_state_dict = true});
    loss.backward();
    alone->forward(torch::ones({2, 3})).pow(2).mean().backward();
    for (size_t i = 0; i < 2; ++i) {
      const auto parameter = alone->parameters()[i];
      EXPECT_TRUE(torch::equal(values.values()[i], full_value(parameter)));
      EXPECT_TRUE(
          torch::equal(full_value(asked->parameters()[i].grad()), full_value(parameter.grad())));
    }
  });
}

TEST(DictUnits, InsideABackwardWholeValuesAreRefused) {
  run_ranks(2, [](int64_t) {
    SmallModel model;
    shard_small_model(model, init_device_mesh(torch::kCPU, {2}));
    fill(*model, 1);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    std::vector<std::string> texts;
    const auto loss = model->forward(torch::ones({4, 5})).pow(2).mean();
    loss.register_hook([&](const torch::Tensor&) {
      const StateDictOptions full{.full_state_dict = true};
      texts.push_back(message_of([&] { get_model_state_dict(*model, full); }));
      texts.push_back(message_of([&] { get_optimizer_state_dict(*model, optimizer, full); }));
    });
    loss.backward();
    ASSERT_EQ(texts.size(), 2u);
    for (const auto& text : texts) EXPECT_THAT(text, HasSubstr("inside a backward"));
  });
}

TEST(DictUnits, StateOfAParameterThatNoUnitManagesComesBackInEveryForm) {
  using torch::optim::AdamW;
  on_ranks_of(2, [](const DeviceMesh& mesh) {
    const auto step = [](SmallModel& model, AdamW& optimizer) {
      optimizer.zero_grad();
      model->eval();
      model->forward(torch::ones({4, 5})).mean().backward();
      optimizer.step();
    };
    for (const auto& get : kForms) {
      SmallModel from, to;
      for (auto* const model : {&from, &to}) {
        FullyShardOptions options;
        options.ignored_params = {(*model)->last->weight};
        fully_shard(*model, mesh, options);
        fill(**model, 1);
      }
      AdamW optimizer(from->parameters(), 0.1), other(to->parameters(), 0.1);
      step(from, optimizer);
      StateDictOptions set = get;
      set.cpu_offload = false;
      set.broadcast_from_rank0 = get.cpu_offload;
      set_model_state_dict(*to, get_model_state_dict(*from, get), set);
      set_optimizer_state_dict(*to, other, get_optimizer_state_dict(*from, optimizer, get), set);
      EXPECT_EQ(other.state().count(to->last->weight.unsafeGetTensorImpl()), 1u);
      step(from, optimizer);
      step(to, other);
      const auto want = full_values(*from);
      for (const auto& item : full_values(*to)) {
        EXPECT_TRUE(torch::equal(item.value(), want[item.key()])) << item.key();
      }
    }
  });
}

// Momentum is state that LibTorch's SGD keeps as a tensor alone.
TEST(DictUnits, MomentumGoesFromWorldToWorldAndTheRunStepsOn) {
  using torch::optim::SGD;
  const auto make = [](int64_t world, SmallModel& model) {
    if (world > 0) shard_small_model(model, init_device_mesh(torch::kCPU, {world}));
    fill(*model, 1);
    torch::NoGradGuard no_grad;
    for (auto& each : model->parameters()) each.mul_(1e-3);
    model->eval();
    return SGD(model->parameters(), torch::optim::SGDOptions(1e-2).momentum(0.9));
  };
  const auto step = [](SmallModel& model, SGD& optimizer) {
    optimizer.zero_grad();
    model->forward(torch::ones({4, 5})).mean().backward();
    optimizer.step();
  };
  SmallModel straight;
  SGD straight_optimizer = make(0, straight);
  for (int i = 0; i < 3; ++i) step(straight, straight_optimizer);
  StateDict values;
  OptimizerStateDict dict;
  run_ranks(2, [&](int64_t rank) {
    SmallModel model;
    SGD optimizer = make(2, model);
    for (int i = 0; i < 2; ++i) step(model, optimizer);
    const StateDictOptions on_host{.full_state_dict = true, .cpu_offload = true};
    const auto its_values = get_model_state_dict(*model, on_host);
    const auto its_dict = get_optimizer_state_dict(*model, optimizer, on_host);
    if (rank == 0) values = its_values, dict = its_dict;
  });
  EXPECT_EQ(dict.state.at("first.weight").count("momentum_buffer"), 1u);
  run_ranks(4, [&](int64_t) {
    SmallModel model;
    SGD optimizer = make(4, model);
    set_model_state_dict(*model, values, {.full_state_dict = true});
    set_optimizer_state_dict(*model, optimizer, dict, {.full_state_dict = true});
    step(model, optimizer);
    for (const auto& item : model->named_parameters()) {
      EXPECT_TRUE(torch::allclose(full_value(item.value()),
                                  straight->named_parameters()[item.key()], 1e-5, 1e-7))
          << item.key();
    }
  });
}

}  // namespace
}  // namespace fsdp::testing
