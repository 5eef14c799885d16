#include "checkpoint/format/dtype.h"
#include "checkpoint/format/json.h"
#include "checkpoint/io/misfits.h"
#include "checkpoint/plan/dict_values.h"
#include "checkpoint/plan/state_items.h"
#include "checkpoint/ranks/tensor_values.h"
#include "checkpoint/ranks/world.h"
#include "checkpoint/state_dict.h"
#include "device_mesh/module_ref.h"
#include "dtensor/dtensor.h"
#include "fully_shard/units/unit.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <map>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fsdp {
namespace {

using namespace internal::checkpoint;  // NOLINT: this file is its front

constexpr const char* kGetModel = "get_model_state_dict";
constexpr const char* kSetModel = "set_model_state_dict";

// What a dict has under a name.
struct Described {
  c10::ScalarType dtype;
  std::vector<int64_t> shape;
};
using Descriptions = std::map<std::string, Described>;

Descriptions describe(const StateDict& values) {
  Descriptions found;
  for (const auto& item : values) {
    const at::Tensor& value = item.value();
    // Of an undefined one it will be told.
    found[item.key()] = value.defined() ? Described{value.scalar_type(), value.sizes().vec()}
                                        : Described{c10::ScalarType::Undefined, {}};
  }
  return found;
}

// Rank 0's, on every rank. Collective.
Descriptions exchange_descriptions(const Descriptions& mine, const World& world) {
  Json json = Json::object();
  for (const auto& [name, each] : mine) {
    json[name] = {static_cast<int64_t>(each.dtype), each.shape};
  }
  const std::string text = exchange(world, world.rank == 0 ? json.dump() : "{}", kSetModel).front();
  const Json first = Json::parse(text);
  Descriptions found;
  for (const auto& [name, each] : first.items()) {
    found[name] = {static_cast<c10::ScalarType>(each.at(0).get<int64_t>()),
                   each.at(1).get<std::vector<int64_t>>()};
  }
  return found;
}

// One call of set_model_state_dict() on one rank.
class ModelSetting {
 public:
  ModelSetting(torch::nn::Module& module, const StateDict& values, const StateDictOptions& options,
               const World& world)
      : module_(module),
        values_(values),
        options_(options),
        world_(world),
        model_(tensors_of(module)) {}

  LoadResult run() {
    const bool sent = options_.broadcast_from_rank0;
    const Descriptions offered =
        sent ? exchange_descriptions(describe(values_), world_) : describe(values_);
    const auto check = [&] { plan(offered); };
    on_all_ranks(check, kSetModel);
    const auto write_all = [&] {
      for (const Step& step : steps_) write(step, offered.at(step.source));
    };
    on_all_ranks(write_all, c10::str(kSetModel, ": the model is now partly overwritten"));
    return std::move(result_);
  }

 private:
  // What fails on one rank that takes part fails on all of them. Collective.
  void on_all_ranks(const std::function<void()>& step, const std::string& what) const {
    if (options_.broadcast_from_rank0) {
      agree(world_, attempt(step), "", what);
    } else {
      attempt_with_all(meshes_of_targets(), step, what);
    }
  }

  struct Step {
    std::string name, source;
    at::Tensor target;
  };

  std::vector<DeviceMesh> meshes_of_targets() const {
    std::vector<at::Tensor> targets;
    for (const NamedTensor& each : model_.tensors) targets.push_back(each.tensor);
    return meshes_of(targets);
  }

  void plan(const Descriptions& offered) {
    check_set_options(options_, kSetModel);
    std::map<std::string, std::vector<std::string>> names;
    for (const auto& [other, first] : model_.ties) names[first].push_back(other);
    if (options_.ignore_frozen_params) {
      for (const auto& item : module_.named_parameters()) {
        if (!item.value().requires_grad()) left_out_.insert(item.key());
      }
    }
    std::set<std::string> used;
    for (const auto& [name, target, unit, codec] : model_.tensors) {
      auto& each = names[name];
      each.insert(each.begin(), name);
      plan_tensor(each, target, offered, used);
    }
    misfits_.raise_any();
    for (const auto& [name, each] : offered) {
      if (used.count(name) == 0) result_.unexpected.push_back(name);
    }
    if (options_.strict)
      check_no_names(result_.missing, "the dict", result_.unexpected,
                     "StateDictOptions::strict = false sets the others");
  }

  void plan_tensor(const std::vector<std::string>& names, const at::Tensor& target,
                   const Descriptions& offered, std::set<std::string>& used) {
    std::vector<std::string> sources;
    for (const auto& name : names) {
      if (offered.count(name) != 0) sources.push_back(name);
    }
    used.insert(sources.begin(), sources.end());
    if (left_out_.count(names.front()) != 0) return;
    if (sources.empty()) {
      result_.missing.push_back(names.front());
      return;
    }
    bool fits = true;
    for (const auto& source : sources) {
      fits &= check(names.front(), target, source, offered.at(source));
    }
    if (!fits) return;
    check_tied(sources);
    steps_.push_back({names.front(), sources.front(), target});
  }

  // Whether it fits; what does not is told with the others.
  bool check(const std::string& name, const at::Tensor& target, const std::string& source,
             const Described& offered) {
    check_has_values({name, target});
    const at::Tensor* const mine = values_.find(source);
    if (mine != nullptr) check_has_values({source, *mine});
    const at::Tensor like = options_.local && is_dtensor(target) ? local_value(target) : target;
    const auto fits = check_fits(
        name, like, {offered.dtype, offered.shape, "in the dict", "convert it first"}, false);
    misfits_.note(fits);
    if (!fits.ok() || mine == nullptr) return fits.ok();
    TORCH_CHECK_VALUE(!options_.broadcast_from_rank0 || !is_dtensor(*mine), "'", source,
                      "' is distributed in the dict; broadcast_from_rank0 sends whole tensors");
    check_comes_to(name, target, *mine);
    return true;
  }

  // A tensor of the model that the dict has under several names.
  void check_tied(const std::vector<std::string>& sources) const {
    const at::Tensor* const first = values_.find(sources.front());
    for (const auto& source : sources) {
      const at::Tensor* const other = values_.find(source);
      TORCH_CHECK_VALUE(first == nullptr || other == nullptr || have_same_values(*first, *other),
                        kSetModel, ": '", sources.front(), "' and '", source,
                        "' are one tensor in the model, and the dict has different values under ",
                        "these names; leave one out");
    }
  }

  void write(const Step& step, const Described& offered) const {
    const c10::NoGradGuard no_grad;
    const at::Tensor* const mine = values_.find(step.source);
    const at::Tensor value =
        options_.broadcast_from_rank0
            ? broadcast_value(world_, mine ? *mine : at::Tensor(), offered.dtype, offered.shape,
                              step.target.device())
            : *mine;
    const at::Tensor part = part_for(step.name, step.target, value, options_.local);
    open_for_writing(step.target).copy_(part);
    close_after_writing(step.target);
  }

  torch::nn::Module& module_;
  const StateDict& values_;
  const StateDictOptions options_;
  const World world_;
  const ModelTensors model_;
  std::set<std::string> left_out_;
  std::vector<Step> steps_;
  Misfits misfits_;
  LoadResult result_;
};

}  // namespace

StateDict get_model_state_dict(ConstModuleRef module, StateDictOptions options) {
  const auto& model = internal::given_module(kGetModel, module);
  check_get_options(options, kGetModel);
  const World world = default_world();
  std::vector<NamedTensor> firsts, distributed;
  std::vector<std::pair<std::string, const c10::TensorImpl*>> names;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> values;  // ties are gathered once
  const auto note = [&](const std::string& name, const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    names.emplace_back(name, tensor.unsafeGetTensorImpl());
    if (!values.try_emplace(tensor.unsafeGetTensorImpl()).second) return;
    firsts.push_back({name, tensor, unit_of(tensor)});
    if (is_dtensor(tensor)) distributed.push_back(firsts.back());
  };
  for (const auto& item : model.named_parameters()) {
    if (!options.ignore_frozen_params || item.value().requires_grad())
      note(item.key(), item.value());
  }
  for (const auto& item : model.named_buffers()) note(item.key(), item.value());
  WholeValues whole(std::move(distributed), world);
  StateDict dict;
  for (const NamedTensor& each : firsts) {
    values[each.tensor.unsafeGetTensorImpl()] =
        dict_value(internal::in_own_dtype(each.tensor), options, world.rank == 0, whole);
  }
  for (const auto& [name, tensor] : names) {
    if (values[tensor].defined()) dict.insert(name, values[tensor]);
  }
  return dict;
}

LoadResult set_model_state_dict(ModuleRef module, const StateDict& values,
                                StateDictOptions options) {
  return ModelSetting(internal::given_module(kSetModel, module), values, options, default_world())
      .run();
}

}  // namespace fsdp
