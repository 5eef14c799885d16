#include "checkpoint/optimizer/optimizer_item.h"

#include "checkpoint/files/errors.h"
#include "checkpoint/format/ivalue_json.h"
#include "checkpoint/optimizer/optimizer_fields.h"
#include "checkpoint/plan/names_in_file.h"

#include <ATen/core/List.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <set>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

constexpr const char* kClass = "class";

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
  if (is_number(value)) {
    saved.details["scalars"].push_back(name);
    saved.tensors.push_back({name, number_tensor(value)});
  } else if (value.isTensor()) {
    if (value.toTensor().defined()) saved.tensors.push_back({name, value.toTensor(), unit});
  } else if (value.isTensorList()) {
    const auto list = value.toTensorList();
    saved.details["lists"][name] = list.size();
    for (size_t i = 0; i < list.size(); ++i) {
      const at::Tensor& element = list.get(i);
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

}  // namespace

OptimizerTensors tensors_of(const torch::optim::Optimizer& optimizer, const ModelTensors& model,
                            const std::string& what) {
  const auto named = named_groups(optimizer, model, what);
  OptimizerTensors saved;
  saved.details = {{kClass, class_of(optimizer)},
                   {"scalars", Json::array()},
                   {"lists", Json::object()},
                   {"groups", Json::array()}};
  for (size_t i = 0; i < named.size(); ++i) {
    Json group = {{"params", names_of(named[i])}, {"options", Json::object()}};
    for (const auto& [option, value] : fields_of(optimizer.param_groups()[i].options())) {
      group["options"][option] = to_json(value, option);
    }
    saved.details["groups"].push_back(std::move(group));
    for (const OptimizerParameter& each : named[i]) {
      const auto state = optimizer.state().find(each.tensor.unsafeGetTensorImpl());
      if (each.turn > 0 || state == optimizer.state().end()) continue;
      for (const auto& [field, value] : fields_of(*state->second)) {
        add_field(saved, kStatePrefix + each.name + "." + field, value, unit_of(each.tensor));
      }
    }
  }
  return saved;
}

OptimizerLoad::OptimizerLoad(torch::optim::Optimizer& optimizer, const ModelTensors& model,
                             const Catalog& catalog, const Json& details,
                             const LoadOptions& options)
    : optimizer_(optimizer), placement_(optimizer), details_(details), strict_(options.strict) {
  check_class();
  find_stored_fields(catalog);
  const auto groups = named_groups(optimizer, model, "load");
  std::set<std::string> used;
  for (size_t i = 0; i < groups.size(); ++i) {
    std::vector<std::string> saved_names;
    for (const OptimizerParameter& each : groups[i]) {
      saved_names.push_back(saved_groups_.saved_name(each, options.name_in_file));
      used.insert(saved_names.back());
      if (each.turn == 0) plan_parameter(each, saved_names.back(), catalog);
    }
    fields_.options.push_back(options_of_group(i, groups[i], saved_names));
  }
  for (const auto& name : saved_groups_.besides(used)) unexpected_.push_back(kStatePrefix + name);
}

void OptimizerLoad::check_class() const {
  std::set<std::string> saved_options;
  for (const Json& group : details_.at("groups")) {
    for (const auto& [name, value] : group.at("options").items()) saved_options.insert(name);
  }
  const std::string own = class_of(optimizer_), saved = details_.value(kClass, own);
  const bool is_like = has_options_like(optimizer_, saved_options);
  if (is_like && (saved == own || !strict_)) return;
  const std::vector<std::string> names(saved_options.begin(), saved_options.end());
  TORCH_CHECK_VALUE(false, "the optimizer that was saved is ",
                    details_.contains(kClass) ? saved : "one with the options " + list_of(names),
                    ", and this one is ", own, "; load into one of its class, or without an ",
                    "optimizer",
                    is_like ? "; LoadOptions::strict = false lets these two pass" : "");
}

void OptimizerLoad::find_stored_fields(const Catalog& catalog) {
  const Json& lists = details_.at("lists");
  for (const auto& [name, tensor] : catalog.tensors) {
    const StateName parsed = state_name_from(name, lists);
    stored_[parsed.parameter].push_back({parsed.field, parsed.index, name});
  }
  const Json none = Json::object();
  for (const auto& [list, length] : lists.items()) {
    const StateName parsed = state_name_from(list, none);
    given_[parsed.parameter][parsed.field] =
        c10::List<at::Tensor>(std::vector<at::Tensor>(length.get<size_t>()));
  }
  const Json values = details_.value("values", Json::object());
  for (const auto& [name, value] : values.items()) {
    const StateName parsed = state_name_from(name, none);
    given_[parsed.parameter][parsed.field] = from_json(value);
  }
  const Json& groups = details_.at("groups");
  for (const Json& group : groups) {
    saved_groups_.add(group.at("params").get<std::vector<std::string>>());
  }
}

void OptimizerLoad::plan_parameter(const OptimizerParameter& named, const std::string& saved_name,
                                   const Catalog& catalog) {
  if (!saved_groups_.has(saved_name)) {
    missing_.push_back(kStatePrefix + named.name);
    return;
  }
  const at::Tensor& parameter = named.tensor;
  const auto stored = stored_.find(saved_name);
  void* const handle = parameter.unsafeGetTensorImpl();
  const auto given = given_.find(saved_name);
  Fields fields = given == given_.end() ? Fields() : given->second;
  if (stored == stored_.end() && fields.empty()) {
    without_state_.insert(handle);
    return;
  }
  const auto found = stored == stored_.end() ? std::vector<StoredField>() : stored->second;
  for (const StoredField& field : found) {
    const StoredTensor& tensor = catalog.tensors.at(field.name);
    const at::Tensor like = placement_.like(parameter, {field.field, field.index}, tensor.shape);
    at::Tensor target = like.defined()
                            ? at::empty_like(like.detach(), at::TensorOptions(tensor.dtype))
                            : at::empty(tensor.shape, parameter.options().dtype(tensor.dtype));
    if (tensor.shape.empty()) target = at::empty({}, at::TensorOptions(tensor.dtype));
    wanted_.push_back({field.name, kStatePrefix + named.name + "." + field.field, target});
    if (field.index < 0) {
      fields[field.field] = target;
    } else {
      fields.at(field.field).toTensorList().set(static_cast<size_t>(field.index), target);
    }
  }
  fields_.state[handle] = std::move(fields);
}

Fields OptimizerLoad::options_of_group(size_t index, const OptimizerGroup& group,
                                       const std::vector<std::string>& saved_names) const {
  Fields options = fields_of(optimizer_.param_groups()[index].options());
  const Json* saved = nullptr;
  for (size_t i = 0; i < group.size(); ++i) {
    if (!saved_groups_.has(saved_names[i])) continue;
    const size_t saved_group = saved_groups_.group_of(saved_names[i], group[i].turn);
    const Json& theirs = details_.at("groups").at(saved_group).at("options");
    if (saved == nullptr) saved = &theirs;
    TORCH_CHECK_VALUE(!strict_ || theirs == *saved, "load: group ", index,
                      " of the optimizer joins parameters that were saved with different options, ",
                      "such as '", saved_names.front(), "' and '", saved_names[i], "'");
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
