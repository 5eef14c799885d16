// Resolves reshard_after_forward on a mesh (PyTorch's _get_post_forward_mesh_info): of
// to_world(n), 1 is false, all ranks that shard is true, and what lies between divides
// them into blocks of n neighbours.
#pragma once

#include "device_mesh/device_mesh.h"
#include "fully_shard/policies.h"

#include <cstdint>
#include <optional>

namespace fsdp::internal {

struct ResolvedReshardAfterForward {
  std::optional<bool> reshards = {};       // unset: true, and false for a root
  std::optional<int64_t> neighbours = {};  // that keep the parameters, where not all or one
};

// Throws ValueError, naming `caller`, for an n that does not divide the ranks that shard.
// Warns once of an n of 1. Local.
ResolvedReshardAfterForward resolve_reshard_after_forward(
    const char* caller, const std::optional<ReshardAfterForward>& asked, const DeviceMesh& mesh);

}  // namespace fsdp::internal
