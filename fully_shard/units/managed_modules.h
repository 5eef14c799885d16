// What one fully_shard call manages: the parameters at and below its modules that no
// deeper unit manages.
#pragma once

#include "fully_shard/units/unit.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace fsdp::internal {

// A registry slot.
struct ParamSlot {
  torch::nn::Module* module;
  std::string key;   // in the module's registry
  std::string path;  // from the unit's module
};

// A distinct parameter with every slot it is registered in.
struct FoundParam {
  at::Tensor tensor;
  std::vector<ParamSlot> slots;
};

struct FoundUnit {
  std::shared_ptr<Unit> unit;
  std::string path;
};

struct ManagedModules {
  std::vector<FoundParam> params;  // in registration order
  std::vector<FoundUnit> units;    // nearest units below, in pre-order
};

// Walks `modules` depth first; shared modules are visited once. Local.
ManagedModules find_managed(const std::vector<torch::nn::Module*>& modules,
                            const std::vector<at::Tensor>& ignored);

// Puts `entry` into a registry slot.
void replace_parameter(const ParamSlot& slot, const at::Tensor& entry);
bool is_registered(const ParamSlot& slot, const at::Tensor& entry);

}  // namespace fsdp::internal
