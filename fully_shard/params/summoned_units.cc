#include "fully_shard/params/summoned_units.h"

#include "fully_shard/units/module_tree.h"
#include "fully_shard/units/unit.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <set>
#include <unordered_map>
#include <utility>

namespace fsdp::internal {
namespace {

class Collection {
 public:
  void add_slot(const at::Tensor& entry, RegistrySlot slot) {
    const auto& group = RegistryEntry::of(entry)->group();
    auto& unit = find_or_add(units_, places_of_units_, group.get());
    unit.group = group;
    unit.modules.push_back(slot.module->weak_from_this().lock());
    auto& param = find_or_add(unit.params, places_of_params_, entry.unsafeGetTensorImpl());
    param.entry = entry;
    param.slots.push_back(std::move(slot));
  }

  std::vector<SummonedUnit> release() { return std::move(units_); }

 private:
  template <class Key>
  using Places = std::unordered_map<const Key*, size_t>;

  template <class Item, class Key>
  static Item& find_or_add(std::vector<Item>& items, Places<Key>& places, const Key* key) {
    const auto [place, is_new] = places.try_emplace(key, items.size());
    return is_new ? items.emplace_back() : items[place->second];
  }

  std::vector<SummonedUnit> units_;
  Places<FSDPParamGroup> places_of_units_;
  Places<c10::TensorImpl> places_of_params_;  // each in its unit
};

}  // namespace

// What a rank shows in its registry says nothing: it may be members, copies, or, with
// rank0_only, the entries.
void check_not_summoned(const Unit& unit, const char* function) {
  TORCH_CHECK_VALUE(!unit.is_summoned(), function, ": unit '", unit.display_name(),
                    "' is summoned already: a SummonFullParams that is alive (apply_unsharded has "
                    "some too) shows its full parameters, and they do not nest. End that scope "
                    "first; every rank gets this error");
}

void check_not_held(const FSDPParamGroup& group) {
  TORCH_CHECK_VALUE(!group.unsharded().state().is_held(), "SummonFullParams: unit '",
                    group.info().name(), "' is held unsharded already (rank ", group.info().rank(),
                    ")");
}

std::vector<SummonedUnit> find_summoned_units(const std::vector<torch::nn::Module*>& modules,
                                              bool recurse) {
  const ModuleTree tree(modules);
  std::set<const FSDPParamGroup*> own;
  for (size_t i = 0; i < tree.size(); ++i) {
    if (!tree.unit(i) || (!recurse && !tree.is_start(i))) continue;
    check_not_summoned(*tree.unit(i), "SummonFullParams");
    own.insert(tree.unit(i)->group());
  }
  Collection found;
  for (size_t i = 0; i < tree.size(); ++i) {
    for (auto& slot : slots_of(tree.module(i))) {
      const auto& tensor = registered(slot);
      const auto group = find_managed_tensor(tensor).group;
      if (!group || (!recurse && !own.contains(group.get()))) continue;
      check_not_summoned(group->info().unit(), "SummonFullParams");
      found.add_slot(tensor, std::move(slot));
    }
  }
  return found.release();
}

}  // namespace fsdp::internal
