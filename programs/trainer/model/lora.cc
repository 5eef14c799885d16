#include "programs/trainer/model/lora.h"

#include <c10/util/Exception.h>
#include <torch/nn/functional.h>
#include <torch/nn/init.h>
#include <torch/utils.h>

#include <algorithm>

namespace programs {
namespace {

std::string last_name(const std::string& path) { return path.substr(path.rfind('.') + 1); }

}  // namespace

torch::Tensor LoraLinearImpl::forward(const torch::Tensor& x) {
  const auto y = LinearImpl::forward(x);
  if (!lora_A) return y;
  return y + (lora_B(lora_A(x.to(torch::kFloat))) * scale_).to(y.scalar_type());
}

void LoraLinearImpl::adapt(int64_t rank, double alpha) {
  const auto linear = [](int64_t in, int64_t out) {
    return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
  };
  lora_A = register_module("lora_A", linear(options.in_features(), rank));
  lora_B = register_module("lora_B", linear(rank, options.out_features()));
  torch::nn::init::zeros_(lora_B->weight);
  scale_ = alpha / static_cast<double>(rank);
}

void add_adapters(torch::nn::Module& model, const LoraOptions& options) {
  if (options.rank == 0) return;
  model.to(options.frozen_dtype);
  for (auto& parameter : model.parameters()) parameter.requires_grad_(false);
  auto unknown = options.targets;
  for (const auto& item : model.named_modules()) {
    const auto found =
        std::find(options.targets.begin(), options.targets.end(), last_name(item.key()));
    auto* const layer = item.value()->as<LoraLinearImpl>();
    if (layer == nullptr || found == options.targets.end()) continue;
    layer->adapt(options.rank, options.alpha);
    std::erase(unknown, *found);
  }
  TORCH_CHECK_VALUE(unknown.empty(), "adapters: no layer that may have one is called '",
                    unknown.front(), "'");
}

}  // namespace programs
