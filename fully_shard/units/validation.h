// Everything fully_shard refuses but placements (shard_placement.h), checked before
// anything is changed. Local.
#pragma once

#include "device_mesh/device_mesh.h"
#include "fully_shard/policies.h"
#include "fully_shard/units/module_tree.h"
#include "fully_shard/units/shared_storage.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace fsdp::internal {

// Resolves reshard_after_forward on a mesh (PyTorch's _get_post_forward_mesh_info): of
// to_world(n), 1 is false, all ranks that shard is true, and what lies between divides
// them into blocks of n neighbours.
struct ResolvedReshardAfterForward {
  std::optional<bool> reshards = {};       // unset: true, and false for a root
  std::optional<int64_t> neighbours = {};  // that keep the parameters, where not all or one
};

// Throws ValueError, naming `caller`, for an n that does not divide the ranks that shard.
// Warns once of an n of 1. Local.
ResolvedReshardAfterForward resolve_reshard_after_forward(
    const char* caller, const std::optional<ReshardAfterForward>& asked, const DeviceMesh& mesh);

// The modules, the mesh and the options by themselves.
void validate_request(const std::vector<torch::nn::Module*>& modules, const DeviceMesh& mesh,
                      const FullyShardOptions& options);
// What the walk found. `users`: of the storages of `modules`, and of more of the model
// where that is known.
void validate_parameters(const std::vector<torch::nn::Module*>& modules,
                         const ManagedModules& managed, const StorageUsers& users,
                         const DeviceMesh& mesh, const FullyShardOptions& options);

}  // namespace fsdp::internal
