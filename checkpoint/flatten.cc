#include "checkpoint/optimizer/archive_fields.h"
#include "checkpoint/optimizer/parameter_names.h"
#include "checkpoint/optimizer_state_dict.h"
#include "checkpoint/plan/state_items.h"
#include "device_mesh/internal/given_module.h"

#include <ATen/core/List.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <tuple>
#include <utility>

namespace fsdp {
namespace {

using namespace internal::checkpoint;  // NOLINT: this file is its front

constexpr const char* kState = "state.";
constexpr const char* kGroups = "param_groups.";

at::Tensor number_tensor(const c10::IValue& value) {
  const auto dtype = value.isInt() ? at::kLong : value.isBool() ? at::kBool : at::kDouble;
  return at::scalar_tensor(value.toScalar(), dtype);
}

bool is_number(const c10::IValue& value) {
  return value.isInt() || value.isDouble() || value.isBool();
}

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

// "a.b" -> {"a", "b"}
std::pair<std::string, std::string> split_last(const std::string& text) {
  const size_t dot = text.rfind('.');
  return dot == std::string::npos ? std::pair(std::string(), text)
                                  : std::pair(text.substr(0, dot), text.substr(dot + 1));
}

bool is_index(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
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
      const std::string key = kState + name + "." + field;
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
    if (key.rfind(kState, 0) == 0) {
      add_state(dict, names, key.substr(std::string(kState).size()), item.value());
    } else {
      TORCH_CHECK_VALUE(key.rfind(kGroups, 0) == 0, "unflatten: '", key,
                        "' is neither state nor an option");
    }
  }
  return dict;
}

}  // namespace fsdp
