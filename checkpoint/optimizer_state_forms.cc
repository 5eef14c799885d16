// The other forms that an optimizer's state has (optimizer_state_dict.h): flattened
// names, numbers for names, and whole tensors that torch::load() left in an optimizer.
#include "checkpoint/optimizer/optimizer_fields.h"
#include "checkpoint/optimizer/parameter_groups.h"
#include "checkpoint/optimizer_state_dict.h"
#include "checkpoint/plan/names_in_file.h"
#include "checkpoint/plan/state_items.h"
#include "device_mesh/module_ref.h"
#include "dtensor/dtensor.h"

#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace fsdp {
namespace {

using namespace internal::checkpoint;  // NOLINT: this file is its front

constexpr const char* kGroups = "param_groups.";

// A number, or a tuple of doubles such as betas.
at::Tensor option_tensor(const std::string& name, const c10::IValue& value) {
  if (is_number(value)) return number_tensor(value);
  TORCH_CHECK_VALUE(value.isTuple(), "flatten: '", name, "' is a ", value.tagKind(),
                    ", which is no number");
  std::vector<double> numbers;
  for (const auto& element : value.toTupleRef().elements()) numbers.push_back(element.toDouble());
  return at::tensor(numbers, at::kDouble);
}

c10::IValue option_value(const at::Tensor& tensor, const c10::IValue& like) {
  if (like.isTuple()) {
    std::vector<c10::IValue> elements;
    for (int64_t i = 0; i < tensor.numel(); ++i) elements.emplace_back(tensor[i].item<double>());
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  if (like.isBool()) return tensor.item<bool>();
  if (like.isInt()) return tensor.item<int64_t>();
  return tensor.item<double>();
}

// Python's step is a float tensor, LibTorch's an integer.
c10::IValue field_value(const std::string& field, const at::Tensor& tensor) {
  if (tensor.dim() != 0) return tensor;
  if (field == "step" || tensor.scalar_type() == at::kLong) return tensor.item<int64_t>();
  if (tensor.scalar_type() == at::kBool) return tensor.item<bool>();
  if (tensor.scalar_type() == at::kDouble) return tensor.item<double>();
  return tensor;
}

void add_state(OptimizerStateDict& dict, const std::map<std::string, std::string>& names,
               const std::string& rest, const at::Tensor& tensor) {
  auto [owner, field] = split_last(rest);
  if (const auto name = names.find(owner); name != names.end()) {
    dict.state[name->second][field] = field_value(field, tensor);
    return;
  }
  TORCH_CHECK_VALUE(is_index(field), "unflatten: 'state.", rest, "' is of no parameter here");
  const auto index = static_cast<size_t>(std::stoull(field));
  std::tie(owner, field) = split_last(owner);
  const auto name = names.find(owner);
  TORCH_CHECK_VALUE(name != names.end(), "unflatten: 'state.", rest, "' is of no parameter here");
  c10::IValue& list = dict.state[name->second][field];
  if (list.isNone()) list = c10::List<at::Tensor>();
  auto tensors = list.toTensorList();
  if (tensors.size() <= index) tensors.resize(index + 1);
  tensors.set(index, tensor);
}

// Of one parameter of a group. A tied one may be in several.
void add_option(StateDict& flat, const std::string& key, const c10::IValue& value) {
  const at::Tensor option = option_tensor(key, value);
  const at::Tensor* const known = flat.find(key);
  if (known == nullptr) {
    flat.insert(key, option);
    return;
  }
  TORCH_CHECK_VALUE(at::equal(*known, option), "flatten: '", key, "' has two values, since its ",
                    "parameter is in two groups, which flattened names cannot tell apart");
}

// By each of the names of an optimizer's parameters, the first one.
std::map<std::string, std::string> first_names(const std::vector<OptimizerGroup>& groups) {
  std::map<std::string, std::string> firsts;
  for (const auto& group : groups) {
    for (const OptimizerParameter& each : group) {
      for (const auto& name : each.names) firsts.emplace(name, each.name);
    }
  }
  return firsts;
}

// The option of the group of `parameter`, under any of its names.
const at::Tensor* find_option(const StateDict& flat, const OptimizerParameter& parameter,
                              const std::string& option) {
  for (const auto& name : parameter.names) {
    if (const auto* const found = flat.find(kGroups + name + "." + option)) return found;
  }
  return nullptr;
}

}  // namespace

StateDict flatten(const OptimizerStateDict& dict) {
  StateDict flat;
  for (const auto& [name, fields] : dict.state) {
    for (const auto& [field, value] : fields) {
      const std::string key = kStatePrefix + name + "." + field;
      if (value.isTensorList()) {
        const auto list = value.toTensorVector();
        for (size_t i = 0; i < list.size(); ++i)
          flat.insert(key + "." + std::to_string(i), list[i]);
      } else {
        flat.insert(key, value.isTensor() ? value.toTensor() : number_tensor(value));
      }
    }
  }
  for (const auto& group : dict.param_groups) {
    for (const auto& name : group.params) {
      for (const auto& [option, value] : group.options) {
        if (!value.isNone()) add_option(flat, kGroups + name + "." + option, value);
      }
    }
  }
  return flat;
}

OptimizerStateDict unflatten(const StateDict& flat, ConstModuleRef module,
                             const torch::optim::Optimizer& optimizer) {
  OptimizerStateDict dict;
  const auto& model = internal::given_module("unflatten", module);
  const auto groups = named_groups(optimizer, tensors_of(model), "unflatten");
  for (size_t i = 0; i < groups.size(); ++i) {
    auto& group = dict.param_groups.emplace_back();
    group.params = names_of(groups[i]);
    for (const auto& [option, like] : fields_of(optimizer.param_groups()[i].options())) {
      if (groups[i].empty() || like.isNone()) continue;
      const at::Tensor* const value = find_option(flat, groups[i].front(), option);
      TORCH_CHECK_VALUE(value != nullptr, "unflatten: '", kGroups, group.params.front(), ".",
                        option, "' is missing");
      group.options[option] = option_value(*value, like);
    }
  }
  const auto names = first_names(groups);
  for (const auto& item : flat) {
    const std::string& key = item.key();
    if (key.rfind(kStatePrefix, 0) == 0) {
      add_state(dict, names, key.substr(std::string(kStatePrefix).size()), item.value());
    } else {
      TORCH_CHECK_VALUE(key.rfind(kGroups, 0) == 0, "unflatten: '", key,
                        "' is neither state nor an option");
    }
  }
  return dict;
}

namespace {

// Nullopt for a dict without keys.
std::optional<KeyType> type_of(const OptimizerStateDict& dict) {
  std::optional<KeyType> type;
  const auto see = [&](const std::string& key) {
    const KeyType here = is_index(key) ? KeyType::kId : KeyType::kName;
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

namespace {

// This rank's part of what is whole, as a step makes state; other state as it is.
at::Tensor part_of_state(const at::Tensor& state, const at::Tensor& parameter) {
  const bool is_whole = state.defined() && !is_dtensor(state) && state.sizes() == parameter.sizes();
  if (!is_whole) return state;
  at::Tensor part = at::empty_like(parameter.detach(), at::TensorOptions(state.scalar_type()));
  return part.copy_(state);
}

Fields parts_of_state(Fields fields, const at::Tensor& parameter) {
  for (auto& [name, value] : fields) {
    if (value.isTensor()) {
      value = part_of_state(value.toTensor(), parameter);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> parts;
      for (const at::Tensor& each : value.toTensorVector())
        parts.push_back(part_of_state(each, parameter));
      value = parts;
    }
  }
  return fields;
}

}  // namespace

void shard_full_optimizer_state(torch::optim::Optimizer& optimizer) {
  const at::NoGradGuard no_grad;
  OptimizerFields fields;
  for (const auto& group : optimizer.param_groups()) {
    fields.options.push_back(fields_of(group.options()));
    for (const auto& parameter : group.params()) {
      const auto state = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (!is_dtensor(parameter) || state == optimizer.state().end()) continue;
      fields.state[parameter.unsafeGetTensorImpl()] =
          parts_of_state(fields_of(*state->second), parameter);
    }
  }
  set_fields(optimizer, fields);
}

}  // namespace fsdp
