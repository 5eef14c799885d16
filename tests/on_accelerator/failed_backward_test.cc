// A backward that throws on a device, and at once the next step: autograd's own thread
// cleans up after it when backward() has thrown already.
#include "fully_shard/fsdp_module.h"
#include "fully_shard/fully_shard.h"
#include "tests/on_accelerator/program.h"
#include "tests/simulated_accelerator/install.h"
#include "tests/support/default_generator.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

constexpr int64_t kLayers = 4;
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
    for (int64_t i = 0; i < kLayers; ++i)
      layers.push_back(register_module(std::to_string(i), torch::nn::Linear(8, 8)));
  }
  // With a node behind layer `throwing` that throws; -1: none.
  at::Tensor forward(at::Tensor x, int64_t throwing = -1) {
    for (int64_t i = 0; i < kLayers; ++i) {
      x = torch::tanh(layers[static_cast<size_t>(i)](x));
      if (i == throwing) x = Throws::apply(x);
    }
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};

std::shared_ptr<Stack> make_stack(const DeviceMesh& mesh) {
  auto model = drawn_from_seed(1, [] { return std::make_shared<Stack>(); });
  for (auto& layer : model->layers) fully_shard(*layer, mesh);
  fully_shard(*model, mesh);
  return model;
}

enum class Next { kForward, kUnshardByHand, kWriteEntries, kReshardByHand };

// What follows a failed backward at once.
void go_on(Stack& model, Next next) {
  const c10::NoGradGuard no_grad;
  if (next == Next::kUnshardByHand) get_fsdp_module(*model.layers[1]).unshard();
  if (next == Next::kReshardByHand) get_fsdp_module(*model.layers[1]).reshard();
  if (next != Next::kWriteEntries) return;
  for (auto& parameter : model.parameters()) parameter.mul_(0.99);
}

Program failing_steps(int64_t throwing, Next next) {
  return [=](ProgramRank& rank) {
    const auto model = make_stack(rank.mesh());
    torch::optim::SGD optimizer(model->parameters(), 1e-1);
    const auto x = torch::linspace(-1, 1 + static_cast<double>(rank.rank()), 24);
    const auto input = x.view({3, 8}).to(rank.device());
    rank.steps(kFailures, [&] {
      optimizer.zero_grad();
      EXPECT_THROW(model->forward(input, throwing).pow(2).sum().backward(), std::runtime_error);
      go_on(*model, next);
      const auto loss = model->forward(input).pow(2).sum();
      loss.backward();
      optimizer.step();
      rank.keep(loss);
    });
    rank.keep_parameters(*model);
  };
}

class FailedBackward : public ::testing::TestWithParam<Next> {
 protected:
  static void SetUpTestSuite() { simulated::install(); }
};

TEST_P(FailedBackward, IsCleanedUpBeforeTheNextStep) {
  for (int64_t throwing = 0; throwing < kLayers; ++throwing) {
    const auto program = failing_steps(throwing, GetParam());
    const auto expected = run_on_cpu(program, 2);
    for (const auto& schedule : schedules_of_programs()) {
      SCOPED_TRACE("layer " + std::to_string(throwing) + ", " + to_string(schedule));
      EXPECT_EQ(faults_of(run_on_devices(program, 2, schedule), expected), "");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, FailedBackward,
                         ::testing::Values(Next::kForward, Next::kUnshardByHand,
                                           Next::kWriteEntries, Next::kReshardByHand));

}  // namespace
}  // namespace fsdp::testing
