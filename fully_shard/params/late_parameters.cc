#include "fully_shard/params/late_parameters.h"

#include "dtensor/dtensor.h"
#include "fully_shard/params/fsdp_param_group.h"
#include "fully_shard/params/registry_entry.h"
#include "fully_shard/units/module_tree.h"
#include "fully_shard/units/registry_slot.h"
#include "fully_shard/units/unit.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

bool may_be_late(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad() && !is_dtensor(tensor) &&
         !find_managed_tensor(tensor).group;
}

void check_module(const ModuleTree& tree, size_t place, int64_t rank) {
  for_each_registered(tree.module(place), [&](const std::string& key, const at::Tensor& tensor) {
    if (!may_be_late(tensor)) return;
    const auto unit = tree.nearest_unit(place);
    TORCH_CHECK_VALUE(
        unit->ignores(tensor), "parameter '", tree.path_of(place, key), "' of shape ",
        tensor.sizes(), " was registered in unit '", unit->display_name(),
        "' after fully_shard, so no unit reduces its gradient and the ranks' copies would differ. "
        "Apply fully_shard to the sub-module that has it, or freeze it with "
        "set_requires_grad(false), or say with FSDPModule::ignore({parameter}) that you keep the "
        "copies equal (rank ",
        rank, ")");
  });
}

using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;

// The outermost modules at and below `unit` that are alive.
void add_outermost(const Unit& unit, Modules& modules) {
  const auto before = modules.size();
  for (const auto& weak : unit.modules()) {
    if (auto module = weak.lock()) modules.push_back(std::move(module));
  }
  if (modules.size() != before) return;
  for (const auto& child : unit.children()) add_outermost(*child, modules);
}

const Unit& root_of(const Unit& unit) {
  const auto* root = &unit;
  while (const auto enclosing = root->parent()) root = enclosing.get();
  return *root;
}

}  // namespace

void check_no_late_parameters(const FSDPParamGroup& group) {
  Modules alive;
  add_outermost(root_of(group.info().unit()), alive);
  std::vector<torch::nn::Module*> starts;
  for (const auto& module : alive) starts.push_back(module.get());
  const ModuleTree tree(starts);
  for (size_t i = 0; i < tree.size(); ++i) check_module(tree, i, group.info().rank());
}

}  // namespace fsdp::internal
