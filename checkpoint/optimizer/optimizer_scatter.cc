#include "checkpoint/optimizer/optimizer_scatter.h"

#include "checkpoint/format/ivalue_json.h"
#include "checkpoint/optimizer/optimizer_fields.h"
#include "checkpoint/optimizer/parameter_groups.h"
#include "checkpoint/plan/dict_values.h"
#include "checkpoint/plan/state_items.h"
#include "dtensor/dtensor.h"

#include <ATen/core/List.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <utility>
#include <vector>

namespace fsdp::internal::checkpoint {
namespace {

// What rank 0 tells first: everything but the elements of tensors. A tensor is
// {"dtype", "shape"}, a list of them {"list": [...]}, any other value {"value"}.
Json outline_of(const at::Tensor& tensor) {
  return {{"dtype", static_cast<int64_t>(tensor.scalar_type())}, {"shape", tensor.sizes().vec()}};
}

Json outline_of(const std::string& name, const c10::IValue& value) {
  if (value.isTensor()) return outline_of(value.toTensor());
  if (!value.isTensorList()) return {{"value", to_json(value, name)}};
  Json list = Json::array();
  for (const at::Tensor& each : value.toTensorVector()) list.push_back(outline_of(each));
  return {{"list", std::move(list)}};
}

Json outline_of(const OptimizerStateDict& dict) {
  Json state = Json::object(), groups = Json::array();
  for (const auto& [name, fields] : dict.state) {
    Json& outlines = state[name] = Json::object();
    for (const auto& [field, value] : fields) outlines[field] = outline_of(field, value);
  }
  for (const auto& group : dict.param_groups) {
    Json options = Json::object();
    for (const auto& [option, value] : group.options) {
      // Tuples come back as tuples: betas.
      options[option] = {{"tuple", value.isTuple()}, {"value", to_json(value, option)}};
    }
    groups.push_back({{"params", group.params}, {"options", std::move(options)}});
  }
  return {{"state", std::move(state)}, {"groups", std::move(groups)}};
}

void check_whole(const OptimizerStateDict& dict) {
  for (const auto& [name, fields] : dict.state) {
    for (const auto& [field, value] : fields) {
      TORCH_CHECK_VALUE(!value.isTensor() || !is_dtensor(value.toTensor()), "'", name, ".", field,
                        "' is distributed in the dict; broadcast_from_rank0 sends whole tensors");
    }
  }
}

std::vector<OptimizerStateDict::Group> groups_from(const Json& json) {
  std::vector<OptimizerStateDict::Group> groups;
  for (const Json& group : json) {
    auto& added = groups.emplace_back();
    group.at("params").get_to(added.params);
    for (const auto& [option, value] : group.at("options").items()) {
      const bool tuple = value.at("tuple").get<bool>();
      const c10::IValue like =
          tuple ? c10::ivalue::Tuple::create(std::vector<c10::IValue>()) : c10::IValue();
      added.options[option] = from_json_like(value.at("value"), like);
    }
  }
  return groups;
}

// Receives, or on rank 0 sends, the fields of one parameter.
class FieldScatter {
 public:
  // `parameter`: undefined where this optimizer has none of that name.
  FieldScatter(const StatePlacement& placement, at::Tensor parameter, const World& world)
      : placement_(placement), parameter_(std::move(parameter)), world_(world) {}

  c10::IValue run(const std::string& name, const std::string& field, const Json& outline,
                  const c10::IValue& mine) const {
    if (outline.contains("value")) return from_json(outline.at("value"));
    if (!outline.contains("list")) {
      return tensor(name, {field}, outline, mine.isTensor() ? mine.toTensor() : at::Tensor());
    }
    c10::List<at::Tensor> list;
    const auto sent = mine.isTensorList() ? mine.toTensorVector() : std::vector<at::Tensor>();
    for (const Json& each : outline.at("list")) {
      list.push_back(tensor(name, {field, static_cast<int64_t>(list.size())}, each,
                            sent.empty() ? at::Tensor() : sent[list.size()]));
    }
    return list;
  }

 private:
  at::Tensor tensor(const std::string& name, const StatePlace& place, const Json& outline,
                    const at::Tensor& mine) const {
    const auto shape = outline.at("shape").get<std::vector<int64_t>>();
    const auto dtype = static_cast<c10::ScalarType>(outline.at("dtype").get<int64_t>());
    const at::Tensor like =
        parameter_.defined() ? placement_.like(parameter_, place, shape) : at::Tensor();
    const auto device = like.defined() ? like.device() : c10::Device(c10::kCPU);
    const at::Tensor whole = broadcast_value(world_, mine, dtype, shape, device);
    if (!like.defined()) return whole;
    return distributed_like(name + "." + place.field, like, whole, /*local=*/false);
  }

  const StatePlacement& placement_;
  const at::Tensor parameter_;
  const World& world_;
};

}  // namespace

OptimizerStateDict scatter(const torch::nn::Module& module,
                           const torch::optim::Optimizer& optimizer, const OptimizerStateDict& dict,
                           const World& world, const std::string& what) {
  std::string mine = "{}";
  std::map<std::string, at::Tensor> parameters;
  const Failure failure = attempt([&] {
    for (const auto& group : named_groups(optimizer, tensors_of(module), what)) {
      for (const OptimizerParameter& each : group) {
        for (const auto& name : each.names) parameters[name] = each.tensor;
      }
    }
    if (world.rank != 0) return;
    check_whole(dict);
    mine = outline_of(dict).dump();
  });
  const Json outline = Json::parse(agree(world, failure, mine, what).front());
  const StatePlacement placement(optimizer);
  OptimizerStateDict scattered;
  scattered.param_groups = groups_from(outline.at("groups"));
  for (const auto& [name, fields] : outline.at("state").items()) {
    const auto parameter = parameters.find(name);
    const FieldScatter sender(
        placement, parameter == parameters.end() ? at::Tensor() : parameter->second, world);
    auto& added = scattered.state[name];
    for (const auto& [field, each] : fields.items()) {
      const c10::IValue value = world.rank == 0 ? dict.state.at(name).at(field) : c10::IValue();
      added[field] = sender.run(name, field, each, value);
    }
  }
  return scattered;
}

}  // namespace fsdp::internal::checkpoint
