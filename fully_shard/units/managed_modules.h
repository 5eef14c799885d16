// What one fully_shard call manages: the parameters and buffers at and below its modules
// that no deeper unit manages.
#pragma once

#include "fully_shard/units/registry_slot.h"
#include "fully_shard/units/unit.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace fsdp::internal {

// A distinct parameter with every slot it is registered in.
struct FoundParam {
  at::Tensor tensor;
  std::string path;  // from the unit's module, of its first slot
  std::vector<RegistrySlot> slots;
  size_t model_handles;  // before the walk made its own
  Shard cut = {};        // place_parameters() sets it

  // By a member, that is, beyond the registry. Handles of the caller count as well.
  bool is_held_by_member() const { return model_handles > slots.size(); }
  // The member of a unit, met under another name: a tie across units.
  bool is_tied_to_a_unit() const;
};

// A nearest unit below, with the path of each of its modules that was met.
struct FoundUnit {
  std::shared_ptr<Unit> unit;
  std::map<const torch::nn::Module*, std::string> paths;
  std::string path;  // of the module that was met first
};

struct ManagedModules {
  std::vector<FoundParam> params;   // in registration order
  std::vector<at::Tensor> buffers;  // distinct, in registration order
  std::vector<FoundUnit> units;     // in pre-order
};

// Local. See module_tree.h for the order.
ManagedModules find_managed(const std::vector<torch::nn::Module*>& modules,
                            const std::vector<at::Tensor>& ignored);

}  // namespace fsdp::internal
