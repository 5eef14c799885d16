// One optimizer of two: its steps are theirs, and so is what it saves.
#include "optim/muon_with_adamw.h"

#include "fully_shard/fully_shard.h"
#include "tensor_parallel/parallelize_module.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/placed_values.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace fsdp {
namespace {

using testing::expect_error;
using testing::full_value;
using ::testing::HasSubstr;
using testing::on_ranks_of;
using testing::run_ranks;
using testing::set_gradients;
using testing::set_values;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;

torch::nn::Sequential perceptron() {
  torch::nn::Sequential model(torch::nn::Linear(6, 10), torch::nn::GELU(),
                              torch::nn::Linear(10, 4));
  set_values(model->parameters());
  return model;
}

// Three steps; `step` is the optimizers'.
void train_with_set_gradients(torch::nn::Sequential& model, const std::function<void()>& step) {
  for (int64_t number = 0; number < 3; ++number) {
    set_gradients(model->parameters(), number);
    step();
  }
}

std::vector<torch::Tensor> trained_by_two() {
  auto model = perceptron();
  const auto split = split_for_muon(model);
  Muon muon(split.matrices(), MuonOptions(2e-2));
  torch::optim::AdamW adamw(split.others(), AdamWOptions(1e-2));
  train_with_set_gradients(model, [&] {
    muon.step();
    adamw.step();
  });
  return model->parameters();
}

void expect_equal_values(torch::nn::Sequential& model, const std::vector<torch::Tensor>& expected) {
  const auto params = model->parameters();
  for (size_t i = 0; i < params.size(); ++i)
    EXPECT_TRUE(torch::equal(full_value(params[i].detach()), expected[i].detach()))
        << "parameter " << i;
}

void expect_trained_as_by_two(torch::nn::Sequential& model) {
  MuonWithAdamW optimizer(split_for_muon(model), MuonOptions(2e-2), AdamWOptions(1e-2));
  train_with_set_gradients(model, [&] { optimizer.step(); });
  EXPECT_EQ(optimizer.state().size(), 4U);
  expect_equal_values(model, trained_by_two());
}

TEST(MuonWithAdamW, StepsAsTheTwo) {
  auto model = perceptron();
  expect_trained_as_by_two(model);
}

TEST(MuonWithAdamW, StepsAsTheTwoOnShardedModels) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{1}, {2}, {3}, {4}, {2, 2}}) {
    run_ranks(c10::multiply_integers(shape), [&](int64_t) {
      auto model = perceptron();
      fully_shard(model, init_device_mesh(c10::kCPU, shape));
      expect_trained_as_by_two(model);
    });
  }
}

// Nothing is sent where each matrix is whole on a rank, and each is computed there.
TEST(MuonWithAdamW, SendsNothingForMatricesOnOwners) {
  for (const int64_t world : {2, 3}) {
    std::atomic<int64_t> matrices = 0;
    on_ranks_of(world, [&](const DeviceMesh& mesh) {
      auto model = perceptron();
      fully_shard(model, mesh, {.shard_placement_fn = [](const auto&, const torch::Tensor& tensor) {
                    return tensor.dim() == 2 ? std::optional<Placement>(Owned{}) : std::nullopt;
                  }});
      MuonWithAdamW optimizer(split_for_muon(model), MuonOptions(2e-2), AdamWOptions(1e-2));
      train_with_set_gradients(model, [&] { optimizer.step(); });
      EXPECT_EQ(optimizer.counters().exchanges, 0);
      matrices += optimizer.counters().matrices;
      expect_equal_values(model, trained_by_two());
    });
    EXPECT_EQ(matrices, 2) << "each once in the world";
  }
}

// Matrices that "tp" cuts along either side, and "dp" along the rows of what is left.
TEST(MuonWithAdamW, StepsAsTheTwoOnModelsThatAreTensorParallelToo) {
  for (const bool fully_sharded : {false, true}) {
    run_ranks(4, [&](int64_t) {
      auto model = perceptron();
      const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
      parallelize_module(model, mesh["tp"], {{"0", ColwiseParallel{}}, {"2", RowwiseParallel{}}});
      if (fully_sharded) fully_shard(model, mesh["dp"]);
      expect_trained_as_by_two(model);
      if (!fully_sharded) return;
      auto owned = perceptron();
      parallelize_module(owned, mesh["tp"], {{"0", ColwiseParallel{}}, {"2", RowwiseParallel{}}});
      fully_shard(owned, mesh["dp"],
                  {.shard_placement_fn = [](const auto&, const auto&) { return Owned{}; }});
      expect_trained_as_by_two(owned);
    });
  }
}

TEST(MuonWithAdamW, TakesGroupsOfBothAndSchedulersSeeThemAll) {
  auto model = perceptron();
  const auto params = model->parameters();
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector{params[1]}, std::make_unique<AdamWOptions>(1e-2));
  groups.emplace_back(std::vector{params[0]}, std::make_unique<MuonOptions>(2e-2));
  groups.emplace_back(std::vector{params[3]}, std::make_unique<AdamWOptions>(1e-2));
  groups.emplace_back(std::vector{params[2]}, std::make_unique<MuonOptions>(2e-2));
  MuonWithAdamW optimizer(groups);
  train_with_set_gradients(model, [&] { optimizer.step(); });
  expect_equal_values(model, trained_by_two());
  torch::optim::StepLR scheduler(optimizer, /*step_size=*/1, /*gamma=*/0.5);
  scheduler.step();  // of its first step, which changes nothing
  scheduler.step();
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 5e-3);
  EXPECT_EQ(optimizer.param_groups()[1].options().get_lr(), 1e-2);
}

TEST(MuonWithAdamW, TakesGroupsThatAreAddedLater) {
  auto model = perceptron();
  const auto params = model->parameters();
  MuonWithAdamW optimizer(
      {OptimizerParamGroup({params[0], params[2]}, std::make_unique<MuonOptions>(2e-2))});
  const std::vector<torch::Tensor> biases = {params[1], params[3]};
  expect_error<c10::ValueError>([&] { optimizer.add_param_group(OptimizerParamGroup(biases)); },
                                HasSubstr("group 1 has no options"));
  expect_error<c10::ValueError>(
      [&] {
        optimizer.add_param_group({biases, std::make_unique<MuonOptions>(2e-2)});
      },
      HasSubstr("parameter 0 of group 1"));
  EXPECT_EQ(optimizer.param_groups().size(), 1U);
  optimizer.add_param_group({biases, std::make_unique<AdamWOptions>(1e-2)});
  train_with_set_gradients(model, [&] { optimizer.step(); });
  expect_equal_values(model, trained_by_two());
}

TEST(MuonWithAdamW, GivesItsClosureAGradAndReturnsItsLoss) {
  auto model = perceptron();
  MuonWithAdamW optimizer(split_for_muon(model));
  const torch::NoGradGuard no_grad;
  const auto loss = optimizer.step([&] {
    auto value = model->forward(torch::ones({1, 6})).sum();
    value.backward();
    return value;
  });
  EXPECT_TRUE(loss.defined());
  EXPECT_EQ(optimizer.counters().matrices, 2);
}

// By torch::save() and torch::load(), which number nothing by name.
TEST(MuonWithAdamW, GoesOnFromWhatLibTorchSaved) {
  auto straight = perceptron(), resumed = perceptron();
  MuonWithAdamW optimizer(split_for_muon(straight), MuonOptions(2e-2), AdamWOptions(1e-2));
  train_with_set_gradients(straight, [&] { optimizer.step(); });
  std::stringstream of_model, of_optimizer;
  torch::save(straight, of_model);
  torch::save(optimizer, of_optimizer);
  MuonWithAdamW other(split_for_muon(resumed), MuonOptions(1), AdamWOptions(1));
  torch::load(resumed, of_model);
  torch::load(other, of_optimizer);
  EXPECT_EQ(other.param_groups()[0].options().get_lr(), 2e-2);
  EXPECT_EQ(other.param_groups()[1].options().get_lr(), 1e-2);
  train_with_set_gradients(straight, [&] { optimizer.step(); });
  train_with_set_gradients(resumed, [&] { other.step(); });
  expect_equal_values(resumed, straight->parameters());
}

TEST(MuonWithAdamW, RefusesWhatOtherGroupsSavedAndKeepsItsState) {
  auto model = perceptron();
  MuonWithAdamW both(split_for_muon(model));
  MuonWithAdamW matrices(
      {OptimizerParamGroup({model->parameters()[0]}, std::make_unique<MuonOptions>(2e-2))});
  set_gradients(model->parameters(), 0);
  both.step();
  matrices.step();
  std::stringstream saved;
  torch::save(matrices, saved);
  expect_error<c10::Error>([&] { torch::load(both, saved); },
                           HasSubstr("has 2 groups of parameters, and 1 where it was saved"));
  EXPECT_EQ(both.state().size(), 4U);
}

TEST(MuonWithAdamW, RefusesGroupsThatAreNobodys) {
  auto model = perceptron();
  expect_error<c10::ValueError>(
      [&] { MuonWithAdamW(std::vector{OptimizerParamGroup(model->parameters())}); },
      HasSubstr("group 0 has no options"));
  expect_error<c10::ValueError>(
      [&] {
        MuonWithAdamW({OptimizerParamGroup(model->parameters(),
                                           std::make_unique<torch::optim::SGDOptions>(1e-2))});
      },
      HasSubstr("options of another optimizer, expected MuonOptions or AdamWOptions"));
  expect_error<c10::ValueError>(
      [&] {
        MuonWithAdamW(
            {OptimizerParamGroup(model->parameters(), std::make_unique<MuonOptions>(1e-2))});
      },
      HasSubstr("parameter 1 of group 0: shape [10] is no matrix"));
  expect_error<c10::ValueError>(
      [&] {
        Muon({OptimizerParamGroup(model->parameters(), std::make_unique<AdamWOptions>(1e-2))});
      },
      HasSubstr("Muon: group 0 has options of another optimizer"));
  torch::nn::Sequential empty;
  expect_error<c10::ValueError>([&] { MuonWithAdamW(split_for_muon(empty)); },
                                HasSubstr("the module has no parameters"));
}

}  // namespace
}  // namespace fsdp
