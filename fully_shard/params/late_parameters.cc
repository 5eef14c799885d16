#include "fully_shard/params/late_parameters.h"

#include "dtensor/dtensor.h"
#include "fully_shard/params/param_group.h"
#include "fully_shard/params/registry_entry.h"
#include "fully_shard/units/module_tree.h"
#include "fully_shard/units/registry_slot.h"
#include "fully_shard/units/unit.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <memory>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

bool is_late(const at::Tensor& tensor, const Unit& unit) {
  return tensor.defined() && tensor.requires_grad() && !is_dtensor(tensor) &&
         !find_managed_tensor(tensor).group && !unit.ignores(tensor);
}

void check_module(const ModuleTree& tree, size_t place, const Unit& unit, int64_t rank) {
  for (const auto& slot : slots_of(tree.module(place))) {
    const auto& tensor = registered(slot);
    TORCH_CHECK_VALUE(
        !is_late(tensor, unit), "parameter '", tree.path_of(place, slot.key), "' of shape ",
        tensor.sizes(), " was registered in unit '", unit.display_name(),
        "' after fully_shard, so no unit reduces its gradient and the ranks' copies would differ. "
        "Apply fully_shard to the sub-module that has it, or freeze it with "
        "set_requires_grad(false), or say with FSDPModule::ignore({parameter}) that you keep the "
        "copies equal (rank ",
        rank, ")");
  }
}

void check_unit(const Unit& unit, int64_t rank) {
  std::vector<std::shared_ptr<torch::nn::Module>> alive;
  std::vector<torch::nn::Module*> starts;
  for (const auto& weak : unit.modules) {
    auto module = weak.lock();
    if (!module) continue;
    starts.push_back(module.get());
    alive.push_back(std::move(module));
  }
  const ModuleTree tree(starts, ModuleTree::Stop::kAtUnits);
  for (size_t i = 0; i < tree.size(); ++i) {
    if (tree.unit(i) == nullptr || tree.unit(i).get() == &unit) check_module(tree, i, unit, rank);
  }
}

Unit& root_of(Unit& unit) {
  auto* root = &unit;
  while (const auto enclosing = root->parent.lock()) root = enclosing.get();
  return *root;
}

}  // namespace

void check_no_late_parameters(const ParamGroup& group) {
  const auto rank = group.dim().global_rank();
  for_each_unit_below(root_of(group.unit()), [rank](Unit& unit) { check_unit(unit, rank); });
}

}  // namespace fsdp::internal
