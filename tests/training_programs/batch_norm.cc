#include "tests/training_programs/batch_norm.h"

#include "dtensor/dtensor.h"

#include <torch/nn/functional/batchnorm.h>
#include <torch/utils.h>

#include <vector>

namespace fsdp::testing {
namespace {

constexpr int64_t kChannels = 3;

// Large enough that devices take their own kernels.
at::Tensor images(int step) {
  const std::vector<int64_t> shape{4, kChannels, 5, 5};
  const auto values = torch::arange(4 * kChannels * 25, at::kFloat) * 0.37 + step;
  return torch::sin(values).view(shape);
}

}  // namespace

void normalize_a_cut_batch(ProgramRank& rank) {
  const auto on_mesh = [&](const at::Tensor& value, const Placement& placement) {
    return distribute_tensor(value.to(rank.device()), rank.mesh(), {placement});
  };
  auto weight = on_mesh(torch::linspace(0.5, 1.5, kChannels), Replicate{});
  auto bias = on_mesh(torch::linspace(-1, 1, kChannels), Replicate{});
  const auto mean = on_mesh(torch::zeros({kChannels}), Replicate{});
  const auto variance = on_mesh(torch::ones({kChannels}), Replicate{});
  weight.requires_grad_(), bias.requires_grad_();
  for (int step = 0; step < 3; ++step) {
    auto x = on_mesh(images(step), Shard{0});
    x.requires_grad_();
    const auto y = torch::batch_norm(x, weight, bias, mean, variance, /*training=*/step < 2,
                                     /*momentum=*/0.1, /*eps=*/1e-5, /*cudnn_enabled=*/true);
    y.pow(3).sum().backward();
    for (const at::Tensor& value : {at::Tensor(y), x.grad(), weight.grad(), bias.grad()})
      rank.keep(value);
    rank.keep(mean);
    rank.keep(variance);
  }
}

}  // namespace fsdp::testing
