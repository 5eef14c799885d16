// Everything fully_shard refuses but placements (shard_placement.h), checked before
// anything is changed. Local.
#pragma once

#include "device_mesh/device_mesh.h"
#include "fully_shard/policies.h"
#include "fully_shard/units/managed_modules.h"

#include <vector>

namespace fsdp::internal {

// The modules, the mesh and the options by themselves.
void validate_request(const std::vector<torch::nn::Module*>& modules, const DeviceMesh& mesh,
                      const FullyShardOptions& options);
// What the walk found.
void validate_parameters(const std::vector<torch::nn::Module*>& modules,
                         const ManagedModules& managed, const DeviceMesh& mesh,
                         const FullyShardOptions& options);

}  // namespace fsdp::internal
