#include "checkpoint/plan/state_items.h"

#include "fully_shard/params/registry_entry.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <unordered_map>

namespace fsdp::internal::checkpoint {

const void* unit_of(const at::Tensor& parameter) {
  return find_managed_tensor(parameter).group.get();
}

ModelTensors tensors_of(const torch::nn::Module& module) {
  ModelTensors found;
  std::unordered_map<const c10::TensorImpl*, std::string> first_names;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const auto [place, is_new] = first_names.emplace(tensor.unsafeGetTensorImpl(), name);
    if (is_new) {
      found.tensors.push_back({name, tensor, unit_of(tensor)});
    } else {
      found.ties.emplace(name, place->second);
    }
  };
  for (const auto& item : module.named_parameters()) add(item.key(), item.value());
  for (const auto& item : module.named_buffers()) add(item.key(), item.value());
  return found;
}

std::map<std::string, torch::nn::Module*> models_of(const State& state) {
  std::map<std::string, torch::nn::Module*> models;
  if (state.model.get() != nullptr) models["model"] = state.model.get();
  for (const auto& [key, model] : state.models) {
    TORCH_CHECK_VALUE(model.get() != nullptr, "State::models: '", key, "' is null");
    models["models/" + key] = model.get();
  }
  return models;
}

std::map<std::string, OptimizerOf> optimizers_of(const State& state) {
  std::map<std::string, OptimizerOf> optimizers;
  const auto add = [&](const std::string& item, OptimizerRef optimizer, const std::string& model) {
    const bool keyed = state.models.count(model) != 0;
    TORCH_CHECK_VALUE(keyed || state.model.get() != nullptr, "checkpoint: '", item,
                      "' without a model: its state is saved by the parameters' names");
    optimizers[item] = {optimizer.get(), keyed ? "models/" + model : "model"};
  };
  if (state.optimizer.get() != nullptr) add("optimizer", state.optimizer, "");
  for (const auto& [key, optimizer] : state.optimizers) {
    TORCH_CHECK_VALUE(optimizer.get() != nullptr, "State::optimizers: '", key, "' is null");
    add("optimizers/" + key, optimizer, key);
  }
  return optimizers;
}

}  // namespace fsdp::internal::checkpoint
