#include "checkpoint/internal/optimizer_item.h"

#include "checkpoint/internal/forget_state.h"
#include "checkpoint/internal/ivalue_json.h"
#include "checkpoint/internal/parameter_names.h"

#include <ATen/core/List.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

constexpr const char* kPrefix = "state.";

bool is_scalar(const c10::IValue& value) {
  return value.isInt() || value.isDouble() || value.isBool();
}

at::Tensor scalar_tensor(const c10::IValue& value) {
  const auto dtype = value.isInt() ? at::kLong : value.isBool() ? at::kBool : at::kDouble;
  return at::scalar_tensor(value.toScalar(), dtype);
}

c10::IValue scalar_value(const at::Tensor& tensor) {
  if (tensor.scalar_type() == at::kBool) return tensor.item<bool>();
  if (c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/false)) {
    return tensor.item<int64_t>();
  }
  return tensor.item<double>();
}

// One field of the state of a parameter of `unit`, saved as `name`.
void add_field(OptimizerTensors& saved, const std::string& name, const c10::IValue& value,
               const void* unit) {
  if (is_scalar(value)) {
    saved.details["scalars"].push_back(name);
    saved.tensors.push_back({name, scalar_tensor(value)});
  } else if (value.isTensor()) {
    if (value.toTensor().defined()) saved.tensors.push_back({name, value.toTensor(), unit});
  } else if (value.isTensorList()) {
    const auto list = value.toTensorList();
    saved.details["lists"][name] = list.size();
    for (size_t i = 0; i < list.size(); ++i) {
      const at::Tensor element = list.get(i);
      if (!element.defined()) {  // scratch that was never filled
        saved.details["lists"].erase(name);
        return;
      }
      saved.tensors.push_back({name + "." + std::to_string(i), element, unit});
    }
  } else {
    TORCH_CHECK_VALUE(value.isNone(), "checkpoint: '", name, "' is a ", value.tagKind(),
                      ", which cannot be saved");
  }
}

bool is_number(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
}

// "a.b.exp_avg" -> {"a.b", "exp_avg"}
std::pair<std::string, std::string> split_last(const std::string& text) {
  const size_t dot = text.rfind('.');
  return dot == std::string::npos ? std::pair(std::string(), text)
                                  : std::pair(text.substr(0, dot), text.substr(dot + 1));
}

}  // namespace

OptimizerTensors tensors_of(const torch::optim::Optimizer& optimizer, const ModelTensors& model,
                            const std::string& what) {
  const auto names = names_of_groups(optimizer, model, what);
  OptimizerTensors saved;
  saved.details = {
      {"scalars", Json::array()}, {"lists", Json::object()}, {"groups", Json::array()}};
  const auto& groups = optimizer.param_groups();
  for (size_t i = 0; i < groups.size(); ++i) {
    Json group = {{"params", Json::array()}, {"options", Json::object()}};
    for (const auto& [option, value] : fields_of(groups[i].options())) {
      group["options"][option] = to_json(value, option);
    }
    for (size_t j = 0; j < groups[i].params().size(); ++j) {
      const at::Tensor& parameter = groups[i].params()[j];
      const std::string& name = names[i][j];
      group["params"].push_back(name);
      const auto state = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (state == optimizer.state().end()) continue;
      for (const auto& [field, value] : fields_of(*state->second)) {
        add_field(saved, kPrefix + name + "." + field, value, unit_of(parameter));
      }
    }
    saved.details["groups"].push_back(std::move(group));
  }
  return saved;
}

OptimizerLoad::OptimizerLoad(torch::optim::Optimizer& optimizer, const ModelTensors& model,
                             const Catalog& catalog, const Json& details,
                             const LoadOptions& options)
    : optimizer_(optimizer), details_(details), strict_(options.strict) {
  find_stored_fields(catalog);
  const auto names = names_of_groups(optimizer, model, "load");
  std::set<std::string> used;
  for (size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    const auto& params = optimizer.param_groups()[i].params();
    std::vector<std::string> stored_names;
    for (size_t j = 0; j < params.size(); ++j) {
      const std::string& name = names[i][j];
      stored_names.push_back(options.name_in_file ? options.name_in_file(name) : name);
      used.insert(stored_names.back());
      plan_parameter(params[j], name, stored_names.back(), catalog);
    }
    fields_.options.push_back(options_of_group(i, stored_names));
  }
  for (const auto& [name, group] : saved_group_) {
    if (used.count(name) == 0) unexpected_.push_back(kPrefix + name);
  }
}

void OptimizerLoad::find_stored_fields(const Catalog& catalog) {
  const Json& lists = details_.at("lists");
  for (const auto& [name, tensor] : catalog.tensors) {
    StoredField field{.name = name};
    std::string rest = name.substr(std::string(kPrefix).size());
    auto [before, last] = split_last(rest);
    if (is_number(last) && lists.contains(kPrefix + before)) {
      field.index = std::stoll(last);
      std::tie(before, last) = split_last(before);
    }
    field.field = last;
    stored_[before].push_back(std::move(field));
  }
  const Json& groups = details_.at("groups");
  for (size_t i = 0; i < groups.size(); ++i) {
    for (const auto& name : groups[i].at("params")) saved_group_[name.get<std::string>()] = i;
  }
}

void OptimizerLoad::plan_parameter(const at::Tensor& parameter, const std::string& name,
                                   const std::string& stored_name, const Catalog& catalog) {
  if (saved_group_.count(stored_name) == 0) {
    missing_.push_back(kPrefix + name);
    return;
  }
  const auto stored = stored_.find(stored_name);
  void* const handle = parameter.unsafeGetTensorImpl();
  Fields fields;
  for (const auto& [list, length] : details_.at("lists").items()) {
    const auto [owner, field] = split_last(list.substr(std::string(kPrefix).size()));
    if (owner != stored_name) continue;
    fields[field] = c10::List<at::Tensor>(std::vector<at::Tensor>(length.get<size_t>()));
  }
  if (stored == stored_.end() && fields.empty()) {
    without_state_.insert(handle);
    return;
  }
  const auto found = stored == stored_.end() ? std::vector<StoredField>() : stored->second;
  for (const StoredField& field : found) {
    const StoredTensor& tensor = catalog.tensors.at(field.name);
    const bool like_parameter = parameter.sizes() == c10::IntArrayRef(tensor.shape);
    at::Tensor target = like_parameter
                            ? at::empty_like(parameter.detach(), at::TensorOptions(tensor.dtype))
                            : at::empty(tensor.shape, parameter.options().dtype(tensor.dtype));
    if (tensor.shape.empty()) target = at::empty({}, at::TensorOptions(tensor.dtype));
    wanted_.push_back({field.name, kPrefix + name + "." + field.field, target});
    if (field.index < 0) {
      fields[field.field] = target;
    } else {
      fields.at(field.field).toTensorList().set(static_cast<size_t>(field.index), target);
    }
  }
  fields_.state[handle] = std::move(fields);
}

Fields OptimizerLoad::options_of_group(size_t group,
                                       const std::vector<std::string>& stored_names) const {
  Fields options = fields_of(optimizer_.param_groups()[group].options());
  const Json* saved = nullptr;
  for (const auto& name : stored_names) {
    const auto found = saved_group_.find(name);
    if (found == saved_group_.end()) continue;
    const Json& theirs = details_.at("groups").at(found->second).at("options");
    if (saved == nullptr) saved = &theirs;
    TORCH_CHECK_VALUE(!strict_ || theirs == *saved, "load: group ", group,
                      " of the optimizer joins parameters that were saved with different options, ",
                      "such as '", stored_names.front(), "' and '", name, "'");
  }
  if (saved == nullptr) return options;
  for (auto& [name, value] : options) {
    if (saved->contains(name)) value = from_json_like(saved->at(name), value);
  }
  return options;
}

void OptimizerLoad::apply() {
  const std::set<std::string> scalars(details_.at("scalars").begin(), details_.at("scalars").end());
  std::map<const void*, std::string> scalar_targets;
  for (const Wanted& wanted : wanted_) {
    if (scalars.count(wanted.stored_name) == 0) continue;
    scalar_targets.emplace(wanted.target.unsafeGetTensorImpl(), wanted.stored_name);
  }
  for (auto& [handle, fields] : fields_.state) {
    for (auto& [field, value] : fields) {
      if (!value.isTensor()) continue;
      const at::Tensor tensor = value.toTensor();
      if (scalar_targets.count(tensor.unsafeGetTensorImpl()) != 0) value = scalar_value(tensor);
    }
  }
  set_fields(optimizer_, fields_);
  forget_state(optimizer_, without_state_);
}

}  // namespace fsdp::internal::checkpoint
