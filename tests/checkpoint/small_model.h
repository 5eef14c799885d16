// A model of every kind of shape that sharding cuts badly.
#pragma once

#include "fully_shard/fully_shard.h"
#include "tests/support/full_value.h"
#include "tests/support/temporary_folder.h"

#include <torch/torch.h>

#include <string>

namespace fsdp::testing {

// Uneven, empty and trailing-empty shards, a frozen and an unused parameter, buffers.
struct SmallModelImpl : torch::nn::Module {
  SmallModelImpl()
      : first(register_module("first", torch::nn::Linear(5, 7))),
        norm(register_module("norm", torch::nn::BatchNorm1d(7))),
        last(register_module("last", torch::nn::Linear(7, 1))),
        frozen(register_parameter("frozen", torch::randn({3}), /*requires_grad=*/false)),
        unused(register_parameter("unused", torch::randn({2, 2}))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return last(torch::dropout(norm(first(x)), 0.25, is_training())) + frozen.sum();
  }
  torch::nn::Linear first;
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear last;
  torch::Tensor frozen, unused;
};
TORCH_MODULE(SmallModel);

// Sets every element of every tensor to what `seed`, its name and its place say.
inline void fill(torch::nn::Module& model, int64_t seed) {
  torch::NoGradGuard no_grad;
  const auto set = [&](const std::string& name, torch::Tensor tensor) {
    const auto start = static_cast<double>(seed * 1000 + static_cast<int64_t>(name.size()) * 50);
    const auto full = torch::arange(tensor.numel(), torch::kDouble).add(start).view(tensor.sizes());
    tensor.copy_(full.to(tensor.scalar_type()));
  };
  for (auto& item : model.named_parameters()) set(item.key(), item.value());
  for (auto& item : model.named_buffers()) set(item.key(), item.value());
}

// Every parameter and buffer, whole. Collective.
inline torch::OrderedDict<std::string, torch::Tensor> full_values(torch::nn::Module& model) {
  torch::OrderedDict<std::string, torch::Tensor> values;
  for (auto& item : model.named_parameters()) {
    values.insert(item.key(), full_value(item.value()).clone());
  }
  for (auto& item : model.named_buffers()) values.insert(item.key(), item.value().clone());
  return values;
}

inline void shard_small_model(SmallModel& model, const DeviceMesh& mesh) {
  fully_shard(model->first, mesh);
  fully_shard(model, mesh);
}

}  // namespace fsdp::testing
