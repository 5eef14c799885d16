// A forward and backward that a CUDA graph can hold: in every schedule of the device, and
// with the bits of steps that are not captured.
#include "dtensor/dtensor.h"
#include "fully_shard/activation_checkpoint.h"
#include "fully_shard/fully_shard.h"
#include "tests/on_accelerator/program.h"
#include "tests/simulated_accelerator/install.h"
#include "tests/support/default_generator.h"

#include <c10/util/StringUtil.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

using ForwardOfSequence =
    std::function<at::Tensor(torch::nn::Sequential& model, const at::Tensor& x)>;

torch::nn::Sequential make_sequence() {
  return drawn_from_seed(1, [] {
    return torch::nn::Sequential(torch::nn::Linear(8, 16), torch::nn::Tanh(),
                                 torch::nn::Linear(16, 16), torch::nn::Linear(16, 4));
  });
}

// The last of three steps is captured, and its gradients keep their tensors, as a graph
// that is replayed needs them.
TrainingProgram captured(const ForwardOfSequence& forward, FullyShardOptions options) {
  return [=](ProgramRank& rank) {
    auto model = make_sequence();
    for (const auto& child : model->children()) {
      if (child->as<torch::nn::Linear>() != nullptr) fully_shard(*child, rank.mesh(), options);
    }
    fully_shard(*model, rank.mesh(), options);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    const auto x = (torch::arange(24).view({3, 8}) / (10.0 + static_cast<double>(rank.rank())))
                       .to(rank.device());
    constexpr int kSteps = 3;
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad(/*set_to_none=*/false);
      const bool is_captured = step == kSteps - 1 && !rank.device().is_cpu();
      if (is_captured) simulated::begin_capture(rank.device());
      const auto loss = forward(model, x).to(at::kFloat).pow(2).sum();
      loss.backward();
      if (is_captured) {
        const auto faults = simulated::end_capture(rank.device());
        TORCH_CHECK(faults.empty(), c10::Join("\n", faults));
      }
      rank.keep(loss);
      optimizer.step();
    }
    rank.keep_parameters(*model);
  };
}

at::Tensor plainly(torch::nn::Sequential& model, const at::Tensor& x) { return model->forward(x); }

ForwardOfSequence recomputed(CheckpointOptions options) {
  return [=](torch::nn::Sequential& model, const at::Tensor& x) {
    return checkpoint(
        options, [&](const at::Tensor& in) { return model->forward(in); }, x);
  };
}

struct CapturedStep {
  std::string name;
  ForwardOfSequence forward = plainly;
  FullyShardOptions options = {};
};

void PrintTo(const CapturedStep& step, std::ostream* out) { *out << step.name; }

std::vector<CapturedStep> captured_steps() {
  return {{.name = "Plain"},
          {.name = "Kept", .options = {.reshard_after_forward = false}},
          {.name = "MixedPrecision",
           .options = {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}}},
          {.name = "Recomputed", .forward = recomputed({.preserve_rng_state = false})}};
}

class GraphCapture : public ::testing::TestWithParam<CapturedStep> {
 protected:
  static void SetUpTestSuite() { simulated::install(); }
};

TEST_P(GraphCapture, OfForwardAndBackwardIsPossible) {
  const auto program = captured(GetParam().forward, GetParam().options);
  for (const int64_t ranks : {1, 2}) {
    const auto expected = run_on_cpu(program, ranks);
    for (const auto& schedule : schedules_of_programs()) {
      const auto run = run_on_devices(program, ranks, schedule);
      EXPECT_EQ(faults_of(run, expected), "") << ranks << " ranks, " << to_string(schedule);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GraphCapture, ::testing::ValuesIn(captured_steps()),
                         [](const auto& info) { return info.param.name; });

// That the test above can fail.
TEST(GraphCaptureOfGeneratorStates, IsRefused) {
  simulated::install();
  const auto run = run_on_devices(captured(recomputed({}), {}), 1, schedules_of_programs().front());
  EXPECT_THAT(run.error, HasSubstr("the state of a generator can not be part of a graph"));
}

}  // namespace
}  // namespace fsdp::testing
