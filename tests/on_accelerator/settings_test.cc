// Training with the settings that lead gradients and parameters other ways: the bits of
// the CPU in every schedule.
#include "fully_shard/fsdp_module.h"
#include "fully_shard/fully_shard.h"
#include "tests/on_accelerator/program.h"
#include "tests/simulated_accelerator/install.h"
#include "tests/support/default_generator.h"

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

constexpr int64_t kRanks = 4;
constexpr int kTrainedSteps = 3;
constexpr int kStreamsOfTwoDimensions = 8;

struct ThreeLayers : torch::nn::Module {
  ThreeLayers() {
    register_module("a", a);
    register_module("b", b);
    register_module("c", c);
  }
  at::Tensor forward(const at::Tensor& x) { return c(torch::tanh(b(torch::tanh(a(x))))); }
  torch::nn::Linear a{8, 12}, b{12, 12}, c{12, 5};
};

std::shared_ptr<ThreeLayers> make_three_layers() {
  return drawn_from_seed(1, [] { return std::make_shared<ThreeLayers>(); });
}

struct Setting {
  std::string name;
  std::vector<int64_t> mesh = {kRanks};
  FullyShardOptions options = {};
  // Before backward `micro` of a step, of two.
  std::function<void(FSDPModule root, int micro)> before_backward = [](FSDPModule, int) {};
};

void PrintTo(const Setting& setting, std::ostream* out) { *out << setting.name; }

Program training_with(const Setting& setting) {
  return [setting](ProgramRank& rank) {
    const auto mesh = init_device_mesh(rank.device().type(), setting.mesh);
    const auto model = make_three_layers();
    fully_shard(*model->a, mesh, setting.options);
    fully_shard(*model->b, mesh, setting.options);
    fully_shard(*model, mesh, setting.options);
    torch::optim::SGD optimizer(model->parameters(), 1e-1);
    const auto values = torch::linspace(-1, 1 + static_cast<double>(rank.rank()), 24);
    const auto x = values.view({3, 8}).to(rank.device());
    rank.steps(kTrainedSteps, [&] {
      optimizer.zero_grad();
      for (int micro = 0; micro < 2; ++micro) {
        setting.before_backward(get_fsdp_module(*model), micro);
        const auto loss = model->forward(x).to(at::kFloat).pow(2).sum();
        loss.backward();
        rank.keep(loss);
      }
      optimizer.step();
    });
    rank.keep_parameters(*model);
  };
}

class TrainingSettings : public ::testing::TestWithParam<Setting> {
 protected:
  static void SetUpTestSuite() { simulated::install(); }
};

TEST_P(TrainingSettings, HaveTheBitsOfCpuInEverySchedule) {
  const auto program = training_with(GetParam());
  const auto expected = run_on_cpu(program, kRanks);
  for (const auto& schedule : simulated::schedules(kStreamsOfTwoDimensions)) {
    SCOPED_TRACE(to_string(schedule));
    EXPECT_EQ(faults_of(run_on_devices(program, kRanks, schedule), expected), "");
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, TrainingSettings,
    ::testing::Values(
        Setting{.name = "Hybrid", .mesh = {2, 2}},
        Setting{.name = "HybridKeepingShardSums",
                .mesh = {2, 2},
                .before_backward = [](FSDPModule root,
                                      int micro) { root.set_requires_all_reduce(micro == 1); }},
        Setting{.name = "ToAWorldOfTwo",
                .options = {.reshard_after_forward = ReshardAfterForward::to_world(2)}},
        Setting{
            .name = "MixedPrecision",
            .options = {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}}},
        Setting{.name = "GradientsThatWait",
                .before_backward = [](FSDPModule root,
                                      int micro) { root.set_requires_gradient_sync(micro == 1); }},
        Setting{.name = "NotTheLastBackward",
                .before_backward = [](FSDPModule root,
                                      int micro) { root.set_is_last_backward(micro == 1); }}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fsdp::testing
