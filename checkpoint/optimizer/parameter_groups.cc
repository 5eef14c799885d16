#include "checkpoint/optimizer/parameter_groups.h"

#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>

namespace fsdp::internal::checkpoint {
namespace {

using NamesByHandle = std::map<const void*, std::vector<std::string>>;

NamesByHandle names_by_handle(const ModelTensors& model) {
  NamesByHandle names;
  std::map<std::string, const void*> handles;
  for (const auto& [name, tensor, unit, codec] : model.tensors) {
    const void* const handle = tensor.unsafeGetTensorImpl();
    names[handle].push_back(name);
    handles[name] = handle;
  }
  for (const auto& [other, first] : model.ties) names.at(handles.at(first)).push_back(other);
  return names;
}

}  // namespace

std::vector<OptimizerGroup> named_groups(const torch::optim::Optimizer& optimizer,
                                         const ModelTensors& model, const std::string& what) {
  const NamesByHandle names = names_by_handle(model);
  std::map<const void*, size_t> turns;
  std::vector<OptimizerGroup> groups;
  for (const auto& group : optimizer.param_groups()) {
    auto& named = groups.emplace_back();
    std::set<const void*> seen;
    for (size_t i = 0; i < group.params().size(); ++i) {
      const at::Tensor& parameter = group.params()[i];
      const void* const handle = parameter.unsafeGetTensorImpl();
      const auto found = names.find(handle);
      TORCH_CHECK_VALUE(found != names.end(), what, ": parameter ", i, " of group ",
                        groups.size() - 1, ", of shape ", parameter.sizes(),
                        ", is no parameter of the model, so it has no name to be saved by. Make ",
                        "the optimizer after fully_shard, over model->parameters()");
      if (!seen.insert(handle).second) continue;
      named.push_back({found->second.front(), found->second, parameter, turns[handle]++});
    }
  }
  return groups;
}

std::vector<std::string> names_of(const OptimizerGroup& group) {
  std::vector<std::string> names;
  for (const OptimizerParameter& each : group) names.push_back(each.name);
  return names;
}

void SavedGroups::add(const std::vector<std::string>& params) {
  for (const auto& name : params) {
    auto& groups = groups_[name];
    if (groups.empty() || groups.back() != count_) groups.push_back(count_);
  }
  ++count_;
}

std::string SavedGroups::saved_name(
    const OptimizerParameter& parameter,
    const std::function<std::string(const std::string&)>& name_in_file) const {
  const auto in_file = [&](const std::string& name) {
    return name_in_file ? name_in_file(name) : name;
  };
  for (const auto& name : parameter.names) {
    if (has(in_file(name))) return in_file(name);
  }
  return in_file(parameter.name);
}

size_t SavedGroups::group_of(const std::string& saved_name, size_t turn) const {
  const auto& groups = groups_.at(saved_name);
  return groups[std::min(turn, groups.size() - 1)];
}

std::vector<std::string> SavedGroups::besides(const std::set<std::string>& used) const {
  std::vector<std::string> names;
  for (const auto& [name, groups] : groups_) {
    if (used.count(name) == 0) names.push_back(name);
  }
  return names;
}

}  // namespace fsdp::internal::checkpoint
