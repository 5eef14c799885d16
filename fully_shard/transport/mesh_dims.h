// What the dimensions of a mesh that parameters are sharded over mean. One dimension
// shards; of two, the first replicates and the second shards (hybrid sharding).
#pragma once

#include "device_mesh/device_mesh.h"

#include <cstdint>
#include <optional>

namespace fsdp::internal {

inline int64_t shard_mesh_dim(const DeviceMesh& mesh) { return mesh.ndim() - 1; }

// None where nobody has the same shards.
inline std::optional<int64_t> replicate_mesh_dim(const DeviceMesh& mesh) {
  return mesh.ndim() == 2 && mesh.size(0) > 1 ? std::optional<int64_t>(0) : std::nullopt;
}

}  // namespace fsdp::internal
