#include "checkpoint/plan/state_items.h"

#include "checkpoint/ranks/tensor_values.h"
#include "fully_shard/params/registry_entry.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/optim/schedulers/lr_scheduler.h>

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
      found.tensors.push_back({name, tensor, unit_of(tensor), codec_of(tensor)});
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

namespace {

using torch::optim::LRScheduler;

// A derived class may form a pointer to the protected member.
struct Access : LRScheduler {
  static unsigned LRScheduler::*member() { return &Access::step_count_; }
};

}  // namespace

unsigned step_count(const LRScheduler& scheduler) { return scheduler.*Access::member(); }
void set_step_count(LRScheduler& scheduler, unsigned count) { scheduler.*Access::member() = count; }

namespace {

constexpr const char* kStridedOnly =
    "checkpoints hold strided tensors, such as to_dense(), or indices() and values(), give";
constexpr const char* kReserved = "__metadata__";

// With a question mark in a diamond for what is not UTF-8.
std::string readable(const std::string& text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

bool is_utf8(const Json& json) {
  try {
    json.dump();
    return true;
  } catch (const Json::exception&) {
    return false;
  }
}

}  // namespace

void check_name(const std::string& name) {
  TORCH_CHECK_VALUE(is_utf8(name), "the name ", readable(name), " is not UTF-8, which names in a ",
                    "checkpoint must be");
  TORCH_CHECK_VALUE(name != kReserved, "the name '", name,
                    "' is one that safetensors files keep for themselves");
}

void check_has_values(const NamedTensor& named) {
  const at::Tensor& tensor = named.tensor;
  TORCH_CHECK_VALUE(tensor.defined(), "'", named.name, "' is an undefined tensor");
  TORCH_CHECK_VALUE(!tensor.is_nested(), "'", named.name, "' is a nested tensor; ", kStridedOnly);
  TORCH_CHECK_VALUE(tensor.layout() == c10::kStrided, "'", named.name, "' is of layout ",
                    tensor.layout(), "; ", kStridedOnly);
  TORCH_CHECK_VALUE(!tensor.is_meta(), "'", named.name, "' is on the meta device and so has no ",
                    "values; fsdp::materialize gives a model's parameters some");
}

void check_savable(const std::vector<SaveItem>& items) {
  for (const SaveItem& item : items) {
    check_name(item.name);
    for (const NamedTensor& each : item.tensors) {
      check_name(each.name);
      check_has_values(each);
    }
    for (const auto& [other, first] : item.ties) check_name(other);
  }
}

std::string text_of(const Json& json, const std::string& name) {
  TORCH_CHECK_VALUE(is_utf8(json), "'", name, "' holds a string that is not UTF-8: ",
                    json.dump(-1, ' ', false, Json::error_handler_t::replace));
  return json.dump();
}

}  // namespace fsdp::internal::checkpoint
