// Everything fully_shard refuses but placements (shard_placement.h), checked before
// anything is changed. Local.
#pragma once

#include "device_mesh/device_mesh.h"
#include "fully_shard/policies.h"
#include "fully_shard/units/managed_modules.h"
#include "fully_shard/units/shared_storage.h"

#include <vector>

namespace fsdp::internal {

// The modules, the mesh and the options by themselves.
void validate_request(const std::vector<torch::nn::Module*>& modules, const DeviceMesh& mesh,
                      const FullyShardOptions& options);
// What the walk found. `users`: of the storages of `modules`, and of more of the model
// where that is known.
void validate_parameters(const std::vector<torch::nn::Module*>& modules,
                         const ManagedModules& managed, const StorageUsers& users,
                         const DeviceMesh& mesh, const FullyShardOptions& options);

}  // namespace fsdp::internal
