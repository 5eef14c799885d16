#include "checkpoint/optimizer/parameter_names.h"
#include "checkpoint/optimizer_state_dict.h"
#include "checkpoint/plan/state_items.h"
#include "device_mesh/internal/given_module.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <unordered_set>

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

// What keys become, for one model and its optimizer.
class NewKeys {
 public:
  NewKeys(KeyType to, const torch::nn::Module& module, const torch::optim::Optimizer& optimizer) {
    const ModelTensors model = tensors_of(module);
    for (const auto& each : model.tensors) names_.insert(each.name);
    for (const auto& [other, first] : model.ties) names_.insert(other);
    size_t number = 0;
    for (const auto& group : named_groups(optimizer, model, "rekey")) {
      for (const OptimizerParameter& each : group) {
        if (each.turn == 0) add(to, each, std::to_string(number++));
      }
    }
  }

  // Null for a name that the optimizer does not have: it is dropped. Throws ValueError
  // for what is nobody's.
  const std::string* find(const std::string& key) const {
    if (const auto found = keys_.find(key); found != keys_.end()) return &found->second;
    TORCH_CHECK_VALUE(names_.count(key) != 0, "rekey: '", key,
                      "' is no parameter of the model, or no number that the optimizer has");
    return nullptr;
  }

 private:
  void add(KeyType to, const OptimizerParameter& parameter, const std::string& id) {
    if (to == KeyType::kName) {
      keys_.emplace(id, parameter.name);
    } else {
      for (const auto& name : parameter.names) keys_.emplace(name, id);
    }
  }

  std::unordered_set<std::string> names_;              // of the model
  std::unordered_map<std::string, std::string> keys_;  // old to new
};

// Each key once: a dict may list a tied parameter under each of its names.
void sort_keys(std::vector<std::string>& keys, KeyType type) {
  std::sort(keys.begin(), keys.end(), [&](const std::string& a, const std::string& b) {
    if (type == KeyType::kName || a.size() == b.size()) return a < b;
    return a.size() < b.size();  // numbers
  });
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
}

}  // namespace

OptimizerStateDict rekey(const OptimizerStateDict& dict, KeyType to, ConstModuleRef module,
                         const torch::optim::Optimizer& optimizer) {
  const auto from = type_of(dict);
  if (!from || *from == to) return dict;
  const NewKeys keys(to, internal::given_module("rekey", module), optimizer);
  OptimizerStateDict result;
  for (const auto& [key, fields] : dict.state) {
    if (const auto* const now = keys.find(key)) result.state[*now] = fields;
  }
  for (const auto& group : dict.param_groups) {
    auto& added = result.param_groups.emplace_back();
    added.options = group.options;
    for (const auto& key : group.params) {
      if (const auto* const now = keys.find(key)) added.params.push_back(*now);
    }
    sort_keys(added.params, to);
  }
  for (const auto& key : dict.uncollected) {
    if (const auto* const now = keys.find(key)) result.uncollected.push_back(*now);
  }
  return result;
}

}  // namespace fsdp
