// Everything fully_shard refuses but placements (shard_placement.h), checked before
// anything is changed, and where a unit's tensors are to be. Local.
#pragma once

#include "device_mesh/device_mesh.h"
#include "fully_shard/policies.h"
#include "fully_shard/units/module_tree.h"
#include "fully_shard/units/shared_storage.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace fsdp::internal {

// fully_shard takes a module on the CPU to its mesh's device, unit by unit. Parameters
// move one at a time, as each becomes a shard (params/group_builder.h), then buffers.

// Where `tensor` is to be: what is on the CPU goes to the mesh's device, all else stays.
c10::Device device_in_unit(const at::Tensor& tensor, const DeviceMesh& mesh);
// Where the unit's modules compute: where its parameters are to be.
c10::Device device_of_unit(const ManagedModules& managed, const DeviceMesh& mesh);
// Of those on the CPU, in place: members, registry and handles taken before see it. On a
// CPU nothing is touched.
void move_buffers(const std::vector<at::Tensor>& buffers, c10::Device device);

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
