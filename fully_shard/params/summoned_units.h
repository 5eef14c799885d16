// Which registered parameters a SummonFullParams shows, and where they stand. Local.
#pragma once

#include "fully_shard/params/fsdp_param_group.h"
#include "fully_shard/params/registry_entry.h"
#include "fully_shard/units/module_tree.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace torch::nn {
class Module;
}

namespace fsdp::internal {

// A parameter with every registry slot it stands in (several when it is tied).
struct SummonedParam {
  at::Tensor entry;
  std::vector<RegistrySlot> slots;
  at::Tensor full;   // what the slots hold meanwhile; undefined where nothing is shown
  at::Tensor shard;  // as it was, where members borrow it and nothing is to be written back
  uint32_t full_version = 0, entry_version = 0;  // when it was shown

  const at::Tensor& member() const { return RegistryEntry::of(entry)->member(); }
  void fill_slots(const at::Tensor& tensor) const {
    for (const auto& slot : slots) put(slot, tensor);
  }
};

struct SummonedUnit {
  c10::intrusive_ptr<FSDPParamGroup> group;
  std::vector<SummonedParam> params;
  std::vector<std::shared_ptr<torch::nn::Module>> modules;  // kept alive for the slots
};

// The sharded parameters registered at and below `modules`, by unit in order of first
// appearance. Without recurse only those of the modules' own units. Throws ValueError, on
// every rank alike, where one of their units is summoned already.
std::vector<SummonedUnit> find_summoned_units(const std::vector<torch::nn::Module*>& modules,
                                              bool recurse);
// Throws ValueError, for `function`, for a unit that is summoned.
void check_not_summoned(const Unit& unit, const char* function);
// Throws ValueError for a group that is held unsharded.
void check_not_held(const FSDPParamGroup& group);

}  // namespace fsdp::internal
