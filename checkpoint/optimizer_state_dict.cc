#include "checkpoint/optimizer_state_dict.h"

#include "checkpoint/files/errors.h"
#include "checkpoint/io/misfits.h"
#include "checkpoint/optimizer/optimizer_fields.h"
#include "checkpoint/optimizer/optimizer_scatter.h"
#include "checkpoint/optimizer/parameter_groups.h"
#include "checkpoint/plan/dict_values.h"
#include "checkpoint/plan/state_items.h"
#include "checkpoint/plan/whole_values.h"
#include "checkpoint/ranks/tensor_values.h"
#include "checkpoint/ranks/world.h"
#include "device_mesh/module_ref.h"
#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/core/List.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace fsdp {
namespace {

using namespace internal::checkpoint;  // NOLINT: this file is its front

constexpr const char* kGetOptimizer = "get_optimizer_state_dict";
constexpr const char* kSetOptimizer = "set_optimizer_state_dict";

// The tensors of a field; some may be undefined.
std::vector<at::Tensor> tensors_in(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  return value.isTensorList() ? value.toTensorVector() : std::vector<at::Tensor>();
}

// Not scratch that was never filled.
bool is_filled(const c10::IValue& value) {
  const auto tensors = tensors_in(value);
  return std::all_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& each) { return each.defined(); });
}

// None where this rank does not get it.
c10::IValue get_field(const c10::IValue& value, const StateDictOptions& options, bool gets_values,
                      WholeValues& whole) {
  if (!is_filled(value)) return value.isTensor() ? value : c10::IValue();
  if (!value.isTensorList() && !value.isTensor()) return value;
  c10::List<at::Tensor> got;
  for (const at::Tensor& each : tensors_in(value)) {
    const at::Tensor wanted = dict_value(each, options, gets_values, whole);
    if (wanted.defined()) got.push_back(wanted);
  }
  if (value.isTensorList()) return got;
  return got.empty() ? c10::IValue() : c10::IValue(got.get(0));
}

// The states of an optimizer's parameters, read in its order.
class OptimizerStates {
 public:
  OptimizerStates(const torch::optim::Optimizer& optimizer,
                  const std::vector<OptimizerGroup>& groups) {
    for (const OptimizerGroup& group : groups) {
      for (const auto& [name, names, parameter, turn] : group) {
        const auto state = optimizer.state().find(parameter.unsafeGetTensorImpl());
        if (turn > 0 || state == optimizer.state().end()) continue;
        const bool is_of_one_rank =
            is_dtensor(parameter) && internal::spec_of(parameter).mesh().size() == 1;
        states_.push_back({name, unit_of(parameter), is_of_one_rank, fields_of(*state->second)});
      }
    }
  }

  // By parameter, as `options` want them. Full: collective over the meshes.
  std::map<std::string, Fields> get(const StateDictOptions& options, const World& world) const {
    WholeValues whole(distributed(), world);
    std::map<std::string, Fields> got;
    for (const ParameterState& state : states_) {
      const bool gets_values = world.rank == 0 || state.is_of_one_rank;
      Fields& fields = got[state.name];
      for (const auto& [field, value] : state.fields) {
        c10::IValue wanted = get_field(value, options, gets_values, whole);
        if (!wanted.isNone()) fields[field] = std::move(wanted);
      }
    }
    return got;
  }

  // The parameters that lie on a mesh of one rank, in a larger world.
  std::vector<std::string> of_one_rank(const World& world) const {
    std::vector<std::string> names;
    for (const ParameterState& state : states_) {
      if (state.is_of_one_rank && world.size > 1) names.push_back(state.name);
    }
    return names;
  }

 private:
  struct ParameterState {
    std::string name;
    const void* unit;
    bool is_of_one_rank;
    Fields fields;
  };
  std::vector<NamedTensor> distributed() const {
    std::vector<NamedTensor> tensors;
    for (const ParameterState& state : states_) {
      for (const auto& [field, value] : state.fields) {
        if (!is_filled(value)) continue;
        for (const at::Tensor& each : tensors_in(value)) {
          if (is_dtensor(each)) tensors.push_back({state.name + "." + field, each, state.unit});
        }
      }
    }
    return tensors;
  }

  std::vector<ParameterState> states_;
};

// One call of set_optimizer_state_dict() on one rank: everything is checked, then made,
// then set.
class OptimizerSetting {
 public:
  OptimizerSetting(const torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                   const OptimizerStateDict& dict, const StateDictOptions& options)
      : module_(module),
        optimizer_(optimizer),
        placement_(optimizer),
        dict_(dict),
        options_(options) {}

  // Local; changes nothing.
  void plan() {
    check_set_options(options_, kSetOptimizer);
    check_class();
    for (const auto& group : dict_.param_groups) saved_groups_.add(group.params);
    const auto groups = named_groups(optimizer_, tensors_of(module_), kSetOptimizer);
    std::set<std::string> used;
    for (size_t i = 0; i < groups.size(); ++i) {
      for (const OptimizerParameter& each : groups[i]) {
        const std::string saved_name = saved_groups_.saved_name(each, {});
        if (each.turn == 0) plan_parameter(each, saved_name);
        used.insert(saved_name);
        for (const auto& name : each.names) {
          if (dict_.state.count(name) == 0) used.insert(name);
        }
      }
      fields_.options.push_back(options_of_group(i, groups[i]));
    }
    result_.unexpected = saved_groups_.besides(used);
    for (const auto& [name, fields] : dict_.state) {
      if (used.count(name) == 0 && !saved_groups_.has(name)) result_.unexpected.push_back(name);
    }
    if (!options_.strict) return;
    check_no_names(result_.missing, "the dict", result_.unexpected,
                   "StateDictOptions::strict = false sets the others; rekey() turns numbers into "
                   "names");
  }

  // Changes nothing of the optimizer. Collective over the meshes of values that lie
  // otherwise than their parameters.
  void make() {
    for (const auto& [parameter, name] : with_state_) make_fields(parameter, name);
  }

  LoadResult apply() {
    set_fields(optimizer_, fields_);
    forget_state(optimizer_, without_state_);
    return std::move(result_);
  }

 private:
  // The dict's: SGD's for AdamW, say.
  void check_class() const {
    for (const auto& group : dict_.param_groups) {
      std::set<std::string> names;
      for (const auto& [name, value] : group.options) names.insert(name);
      TORCH_CHECK_VALUE(has_options_like(optimizer_, names), kSetOptimizer, ": the dict has the ",
                        "options ", list_of({names.begin(), names.end()}), " and so is of no ",
                        class_of(optimizer_), ", which the optimizer is");
    }
  }

  void plan_parameter(const OptimizerParameter& named, const std::string& name) {
    if (!saved_groups_.has(name)) {
      result_.missing.push_back(named.name);
      return;
    }
    const auto state = dict_.state.find(name);
    if (state == dict_.state.end()) {
      without_state_.insert(named.tensor.unsafeGetTensorImpl());
      return;
    }
    for (const auto& [field, value] : state->second) check(name, named.tensor, field, value);
    with_state_.emplace_back(named.tensor, name);
  }

  // That placed() can make it.
  void check(const std::string& name, const at::Tensor& parameter, const std::string& field,
             const c10::IValue& value) const {
    if (value.isTensor()) return check_tensor(name, parameter, {field}, value.toTensor());
    if (!value.isTensorList()) return;
    const auto list = value.toTensorVector();
    for (size_t i = 0; i < list.size(); ++i)
      check_tensor(name, parameter, {field, static_cast<int64_t>(i)}, list[i]);
  }

  void check_tensor(const std::string& name, const at::Tensor& parameter, const StatePlace& place,
                    const at::Tensor& value) const {
    const at::Tensor like = like_of(parameter, place, value);
    if (!like.defined()) return;
    const std::string full_name = name + "." + place.field;
    check_comes_to(full_name, like, value);
    if (!is_part(parameter, value) || is_dtensor(value)) return;
    TORCH_CHECK_VALUE(value.sizes() == local_value(like).sizes(), kSetOptimizer, ": '", full_name,
                      "' has shape ", value.sizes(), ", which is not this rank's part");
  }

  void make_fields(const at::Tensor& parameter, const std::string& name) {
    Fields& fields = fields_.state[parameter.unsafeGetTensorImpl()];
    for (const auto& [field, value] : dict_.state.at(name)) {
      if (!value.isNone()) fields[field] = placed(name, parameter, field, value);
    }
  }

  c10::IValue placed(const std::string& name, const at::Tensor& parameter, const std::string& field,
                     const c10::IValue& value) const {
    if (value.isTensor()) return placed_tensor(name, parameter, {field}, value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) {
      list.push_back(
          placed_tensor(name, parameter, {field, static_cast<int64_t>(list.size())}, each));
    }
    return list;
  }

  // As StatePlacement says, or a copy.
  at::Tensor placed_tensor(const std::string& name, const at::Tensor& parameter,
                           const StatePlace& place, const at::Tensor& value) const {
    const at::Tensor like = like_of(parameter, place, value);
    if (!like.defined()) return value.detach().clone();
    return distributed_like(name + "." + place.field, like, value, options_.local);
  }

  bool is_part(const at::Tensor& parameter, const at::Tensor& value) const {
    return options_.local && is_dtensor(parameter) && value.dim() > 0;
  }
  // Undefined: it stays plain.
  at::Tensor like_of(const at::Tensor& parameter, const StatePlace& place,
                     const at::Tensor& value) const {
    return is_part(parameter, value) ? placement_.like_of_part(parameter, place)
                                     : placement_.like(parameter, place, value.sizes());
  }

  Fields options_of_group(size_t index, const OptimizerGroup& group) const {
    Fields options = fields_of(optimizer_.param_groups()[index].options());
    const OptimizerStateDict::Group* saved = nullptr;
    for (const OptimizerParameter& each : group) {
      const std::string name = saved_groups_.saved_name(each, {});
      if (!saved_groups_.has(name)) continue;
      const auto& theirs = dict_.param_groups[saved_groups_.group_of(name, each.turn)];
      if (saved == nullptr) saved = &theirs;
      TORCH_CHECK_VALUE(!options_.strict || saved == &theirs || saved->options == theirs.options,
                        kSetOptimizer, ": group ", index, " of the optimizer joins '",
                        group.front().name, "' and '", name,
                        "', which have different options in the dict");
    }
    if (saved == nullptr) return options;
    for (auto& [option, value] : options) {
      if (const auto found = saved->options.find(option); found != saved->options.end()) {
        value = found->second;
      }
    }
    return options;
  }

  const torch::nn::Module& module_;
  torch::optim::Optimizer& optimizer_;
  const StatePlacement placement_;
  const OptimizerStateDict& dict_;
  const StateDictOptions options_;
  SavedGroups saved_groups_;
  std::vector<std::pair<at::Tensor, std::string>> with_state_;  // parameters, by names in the dict
  OptimizerFields fields_;
  std::set<const void*> without_state_;
  LoadResult result_;
};

std::vector<DeviceMesh> meshes_of_parameters(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> targets;
  for (const auto& group : optimizer.param_groups()) {
    targets.insert(targets.end(), group.params().begin(), group.params().end());
  }
  return meshes_of(targets);
}

// What rank 0 sends, and what is this rank's own. Collective over `world`.
OptimizerStateDict receive(const torch::nn::Module& module,
                           const torch::optim::Optimizer& optimizer, const OptimizerStateDict& dict,
                           const World& world) {
  OptimizerStateDict mine = scatter(module, optimizer, dict, world, kSetOptimizer);
  for (const auto& name : dict.uncollected) {
    if (const auto own = dict.state.find(name); own != dict.state.end())
      mine.state[name] = own->second;
  }
  return mine;
}

}  // namespace

OptimizerStateDict get_optimizer_state_dict(ConstModuleRef module,
                                            const torch::optim::Optimizer& optimizer,
                                            StateDictOptions options) {
  check_get_options(options, kGetOptimizer);
  const World world = default_world();
  const auto& model = internal::given_module(kGetOptimizer, module);
  const auto groups = named_groups(optimizer, tensors_of(model), kGetOptimizer);
  OptimizerStateDict dict;
  for (size_t i = 0; i < groups.size(); ++i) {
    dict.param_groups.push_back(
        {names_of(groups[i]), fields_of(optimizer.param_groups()[i].options())});
  }
  const OptimizerStates states(optimizer, groups);
  dict.state = states.get(options, world);
  if (!options.full_state_dict) return dict;
  dict.uncollected = states.of_one_rank(world);
  if (!options.cpu_offload || world.rank == 0) return dict;
  OptimizerStateDict own;  // the others get nothing else
  for (const auto& name : dict.uncollected) own.state[name] = std::move(dict.state[name]);
  own.uncollected = std::move(dict.uncollected);
  return own;
}

LoadResult set_optimizer_state_dict(ConstModuleRef module, torch::optim::Optimizer& optimizer,
                                    const OptimizerStateDict& dict, StateDictOptions options) {
  const auto& model = internal::given_module(kSetOptimizer, module);
  if (options.broadcast_from_rank0) {
    check_set_options(options, kSetOptimizer);
    const World world = default_world();
    const OptimizerStateDict mine = receive(model, optimizer, dict, world);
    OptimizerSetting setting(model, optimizer, mine, options);
    agree(world, attempt([&] { setting.plan(); }), "", kSetOptimizer);
    agree(world, attempt([&] { setting.make(); }), "", kSetOptimizer);
    return setting.apply();
  }
  OptimizerSetting setting(model, optimizer, dict, options);
  const auto meshes = meshes_of_parameters(optimizer);
  attempt_with_all(
      meshes, [&] { setting.plan(); }, kSetOptimizer);
  attempt_with_all(
      meshes, [&] { setting.make(); }, kSetOptimizer);
  return setting.apply();
}

}  // namespace fsdp
