#include "fully_shard/params/summoned_units.h"

#include "fully_shard/units/module_tree.h"
#include "fully_shard/units/unit.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <set>
#include <utility>

namespace fsdp::internal {
namespace {

template <class Item, class Matches>
Item& find_or_add(std::vector<Item>& items, const Matches& matches) {
  const auto found = std::find_if(items.begin(), items.end(), matches);
  return found != items.end() ? *found : items.emplace_back();
}

void add_slot(std::vector<SummonedUnit>& units, const at::Tensor& entry, RegistrySlot slot) {
  const auto& group = RegistryEntry::of(entry)->group();
  auto& unit = find_or_add(units, [&](const auto& other) { return other.group == group; });
  unit.group = group;
  unit.modules.push_back(slot.module->weak_from_this().lock());
  auto& param =
      find_or_add(unit.params, [&](const auto& other) { return other.entry.is_same(entry); });
  param.entry = entry;
  param.slots.push_back(std::move(slot));
}

}  // namespace

// What a rank shows in its registry says nothing: it may be members, copies, or, with
// rank0_only, the entries.
void check_not_summoned(const Unit& unit, const char* function) {
  TORCH_CHECK_VALUE(!unit.is_summoned(), function, ": unit '", unit.display_name(),
                    "' is summoned already: a SummonFullParams that is alive (apply_unsharded has "
                    "some too) shows its full parameters, and they do not nest. End that scope "
                    "first; every rank gets this error");
}

void check_not_held(const ParamGroup& group) {
  TORCH_CHECK_VALUE(!group.residency().is_held(), "SummonFullParams: unit '", group.name(),
                    "' is held unsharded already (rank ", group.dim().global_rank(), ")");
}

std::vector<SummonedUnit> find_summoned_units(const std::vector<torch::nn::Module*>& modules,
                                              bool recurse) {
  std::vector<SummonedUnit> units;
  const ModuleTree tree(modules);
  std::set<const ParamGroup*> own;
  for (size_t i = 0; i < tree.size(); ++i) {
    if (!tree.unit(i) || (!recurse && !tree.is_start(i))) continue;
    check_not_summoned(*tree.unit(i), "SummonFullParams");
    own.insert(tree.unit(i)->group);
  }
  for (size_t i = 0; i < tree.size(); ++i) {
    for (auto& slot : slots_of(tree.module(i))) {
      const auto& tensor = registered(slot);
      const auto group = find_managed_tensor(tensor).group;
      if (!group || (!recurse && !own.contains(group.get()))) continue;
      check_not_summoned(group->unit(), "SummonFullParams");
      add_slot(units, tensor, std::move(slot));
    }
  }
  return units;
}

}  // namespace fsdp::internal
