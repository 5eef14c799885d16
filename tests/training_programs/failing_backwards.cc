#include "tests/training_programs/failing_backwards.h"

#include "fully_shard/describe_units.h"
#include "fully_shard/fsdp_module.h"
#include "fully_shard/fully_shard.h"
#include "fully_shard/raw_access.h"
#include "tests/support/default_generator.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

constexpr int kFailures = 15;  // of each layer

// The identity, whose backward throws.
struct Throws : torch::autograd::Function<Throws> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::runtime_error("thrown by a node");
  }
};

struct Stack : torch::nn::Module {
  Stack() {
    for (int64_t i = 0; i < kFailingLayers; ++i)
      layers.push_back(register_module(std::to_string(i), torch::nn::Linear(8, 8)));
  }
  // With a node behind layer `throwing` that throws; -1: none.
  at::Tensor forward(at::Tensor x, int64_t throwing = -1) {
    for (int64_t i = 0; i < kFailingLayers; ++i) {
      x = torch::tanh(layers[static_cast<size_t>(i)](x));
      if (i == throwing) x = Throws::apply(x);
    }
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};

std::shared_ptr<Stack> make_stack(const DeviceMesh& mesh, Next next) {
  FullyShardOptions options;
  if (next == Next::kFullPrecision)  // which changes nothing without; sums have the bits of the CPU
    options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  auto model = drawn_from_seed(1, [] { return std::make_shared<Stack>(); });
  for (auto& layer : model->layers) fully_shard(*layer, mesh, options);
  fully_shard(*model, mesh, options);
  return model;
}

// What follows a failed backward at once.
void go_on(Stack& model, Next next) {
  const c10::NoGradGuard no_grad;
  if (next == Next::kExplicitUnshard) get_fsdp_module(*model.layers[1]).unshard();
  if (next == Next::kExplicitReshard) get_fsdp_module(*model.layers[1]).reshard();
  if (next == Next::kOtherPolicies) {
    auto unit = get_fsdp_module(*model.layers[1]);
    unit.set_reshard_after_forward(true);
    unit.set_modules_to_forward_prefetch({get_fsdp_module(*model.layers[2])});
    unit.set_modules_to_backward_prefetch({});
  }
  if (next == Next::kFullPrecision) {
    for (const bool full_precision : {true, false})
      get_fsdp_module(model).set_full_precision(full_precision);
  }
  if (next == Next::kNewSchedule) get_fsdp_module(model).reset_lazy_init();
  if (next == Next::kDescription) {
    EXPECT_EQ(describe_units(model).find("gathering"), std::string::npos);
  }
  if (next != Next::kWriteEntries) return;
  for (auto& parameter : model.parameters()) parameter.mul_(0.99);
}

void fail(Stack& model, const at::Tensor& input, int64_t throwing, Next next) {
  std::optional<Unsharded> scope;
  if (next == Next::kEndOfUnsharded) scope.emplace(model.layers[1]->weight);
  EXPECT_THROW(model.forward(input, throwing).pow(2).sum().backward(), std::runtime_error);
}

}  // namespace

TrainingProgram failing_backwards(int64_t throwing, Next next) {
  return [=](ProgramRank& rank) {
    const auto model = make_stack(rank.mesh(), next);
    torch::optim::SGD optimizer(model->parameters(), 1e-1);
    const auto x = torch::linspace(-1, 1 + static_cast<double>(rank.rank()), 24);
    const auto input = x.view({3, 8}).to(rank.device());
    std::vector<std::shared_ptr<Stack>> others;  // made where the host may wait for the device
    while (next == Next::kDestruction && others.size() < kFailures)
      others.push_back(make_stack(rank.mesh(), next));
    rank.steps(kFailures, [&] {
      optimizer.zero_grad();
      auto failing = model;
      if (next == Next::kDestruction) {
        failing = others.back();
        others.pop_back();
      }
      fail(*failing, input, throwing, next);
      failing.reset();
      go_on(*model, next);
      const auto loss = model->forward(input).pow(2).sum();
      loss.backward();
      optimizer.step();
      rank.keep(loss);
    });
    rank.keep_parameters(*model);
  };
}

}  // namespace fsdp::testing
