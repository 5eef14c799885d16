#include "checkpoint/internal/parameter_names.h"
#include "checkpoint/internal/state_items.h"
#include "checkpoint/optimizer_state_dict.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>

namespace fsdp {
namespace {

using namespace internal::checkpoint;  // NOLINT: this file is its front

bool is_id(const std::string& key) {
  return !key.empty() && key.find_first_not_of("0123456789") == std::string::npos;
}

// Nullopt for a dict without keys.
std::optional<KeyType> type_of(const OptimizerStateDict& dict) {
  std::optional<KeyType> type;
  const auto see = [&](const std::string& key) {
    const KeyType here = is_id(key) ? KeyType::kId : KeyType::kName;
    TORCH_CHECK_VALUE(!type || *type == here, "rekey: '", key,
                      "' is of another kind than the keys before: some are names, some numbers");
    type = here;
  };
  for (const auto& [key, fields] : dict.state) see(key);
  for (const auto& group : dict.param_groups) {
    for (const auto& key : group.params) see(key);
  }
  return type;
}

using Keys = std::map<std::string, std::string>;  // old to new

Keys new_keys(KeyType to, const torch::nn::Module& module,
              const torch::optim::Optimizer& optimizer) {
  const ModelTensors model = tensors_of(module);
  Keys keys;
  size_t number = 0;
  for (const auto& group : named_groups(optimizer, model, "rekey")) {
    for (const OptimizerParameter& each : group) {
      if (each.turn > 0) continue;
      const std::string id = std::to_string(number++);
      if (to == KeyType::kName) {
        keys.emplace(id, each.name);
      } else {
        for (const auto& name : each.names) keys.emplace(name, id);
      }
    }
  }
  return keys;
}

// Whether `key` is to be kept. Names that the optimizer does not have are dropped.
bool is_known(const std::string& key, const Keys& keys, const torch::nn::Module& module) {
  if (keys.count(key) != 0) return true;
  const ModelTensors model = tensors_of(module);
  const bool is_of_model = model.ties.count(key) != 0 ||
                           std::any_of(model.tensors.begin(), model.tensors.end(),
                                       [&](const NamedTensor& each) { return each.name == key; });
  TORCH_CHECK_VALUE(is_of_model, "rekey: '", key, "' is no parameter of the model, or ",
                    "no number that the optimizer has");
  return false;
}

// Each key once: a dict may list a tied parameter under each of its names.
void sort_keys(std::vector<std::string>& keys, KeyType type) {
  std::sort(keys.begin(), keys.end(), [&](const std::string& a, const std::string& b) {
    if (type == KeyType::kName || a.size() == b.size()) return a < b;
    return a.size() < b.size();  // numbers
  });
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
}

}  // namespace

OptimizerStateDict rekey(const OptimizerStateDict& dict, KeyType to,
                         const torch::nn::Module& module,
                         const torch::optim::Optimizer& optimizer) {
  const auto from = type_of(dict);
  if (!from || *from == to) return dict;
  const Keys keys = new_keys(to, module, optimizer);
  OptimizerStateDict result;
  for (const auto& [key, fields] : dict.state) {
    if (is_known(key, keys, module)) result.state[keys.at(key)] = fields;
  }
  for (const auto& group : dict.param_groups) {
    auto& added = result.param_groups.emplace_back();
    added.options = group.options;
    for (const auto& key : group.params) {
      if (is_known(key, keys, module)) added.params.push_back(keys.at(key));
    }
    sort_keys(added.params, to);
  }
  for (const auto& key : dict.uncollected) {
    if (is_known(key, keys, module)) result.uncollected.push_back(keys.at(key));
  }
  return result;
}

}  // namespace fsdp
