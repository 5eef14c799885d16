// Along which dimension the parameters of a unit are sharded. Local.
#pragma once

#include "device_mesh/device_mesh.h"
#include "fully_shard/policies.h"
#include "fully_shard/units/managed_modules.h"

namespace fsdp::internal {

// Sets the sharded dimension of every parameter that no unit has yet, as
// options.shard_placement_fn says, which is asked once for each. Throws ValueError for a
// dimension that the parameter does not have.
void place_parameters(ManagedModules& managed, const DeviceMesh& mesh,
                      const FullyShardOptions& options);

using ShardPlacementFn = decltype(FullyShardOptions::shard_placement_fn);

// Answers as `function`, and asks it once per parameter. None for none. Keeps no
// parameter alive. REQUIRES: parameters live as long as it is called.
ShardPlacementFn asking_once(ShardPlacementFn function);

}  // namespace fsdp::internal
