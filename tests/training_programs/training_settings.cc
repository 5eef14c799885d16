#include "tests/training_programs/training_settings.h"

#include "tests/support/default_generator.h"

#include <torch/nn.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <memory>

namespace fsdp::testing {
namespace {

constexpr int kTrainedSteps = 3;

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

auto matrices_in(std::shared_ptr<const GatherCodec> codec) {
  return [codec = std::move(codec)](const std::string&, const at::Tensor& weight) {
    return weight.dim() == 2 ? codec : nullptr;
  };
}

}  // namespace

void PrintTo(const Setting& setting, std::ostream* out) { *out << setting.name; }

TrainingProgram training_with(const Setting& setting) {
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

std::vector<Setting> training_settings() {
  return {
      Setting{.name = "Hybrid", .mesh = {2, 2}},
      Setting{.name = "HybridKeepingShardSums",
              .mesh = {2, 2},
              .before_backward = [](FSDPModule root,
                                    int micro) { root.set_requires_all_reduce(micro == 1); }},
      Setting{.name = "ToAWorldOfTwo",
              .options = {.reshard_after_forward = ReshardAfterForward::to_world(2)}},
      Setting{.name = "MixedPrecision",
              .options = {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}}},
      Setting{.name = "SumsOf16Bits", .options = {.mp_policy = {.reduce_dtype = at::kBFloat16}}},
      Setting{.name = "Mxfp8Gathers", .options = {.gather_codec_fn = matrices_in(mxfp8())}},
      Setting{.name = "Nf4Gathers", .options = {.gather_codec_fn = matrices_in(nf4())}},
      Setting{.name = "GatheredAndReducedInt8",
              .options = {.gather_codec_fn = matrices_in(mxint8()),
                          .gradient_codecs = {.shards = mxint8()}}},
      Setting{.name = "ReplicasInt8WithErrorFeedback",
              .mesh = {2, 2},
              .options = {.gradient_codecs = {.replicas = mxint8(), .error_feedback = true}}},
      Setting{.name = "GradientsThatWait",
              .before_backward = [](FSDPModule root,
                                    int micro) { root.set_requires_gradient_sync(micro == 1); }},
      Setting{.name = "NotTheLastBackward", .before_backward = [](FSDPModule root, int micro) {
                root.set_is_last_backward(micro == 1);
              }}};
}

}  // namespace fsdp::testing
