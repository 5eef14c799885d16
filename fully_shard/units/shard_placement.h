// How the parameters of a unit are sharded. Local.
#pragma once

#include "device_mesh/device_mesh.h"
#include "fully_shard/policies.h"
#include "fully_shard/units/module_tree.h"

#include <cstdint>
#include <vector>

namespace fsdp::internal {

int64_t ranks_that_shard(const DeviceMesh& mesh);

// Sets the cut of every parameter that no unit has yet, over `ranks` ranks, as
// options.shard_placement_fn says, which is asked once for each: Shard(0) where it says
// nothing. An Owned{} stays as it is. Throws ValueError for what does not fit the
// parameter or the ranks.
void place_parameters(ManagedModules& managed, int64_t ranks, const FullyShardOptions& options,
                      const ErrorContext& context);

// Gives each parameter that is placed Owned{} an owner (planned_owners.h). `owned_bytes`:
// what each coordinate was given so by the units before, to which it is added.
void plan_owners(ManagedModules& managed, int64_t ranks, std::vector<int64_t>& owned_bytes);

using ShardPlacementFn = decltype(FullyShardOptions::shard_placement_fn);

// Answers as `function`, and asks it once per parameter. None for none. Keeps no
// parameter alive. REQUIRES: parameters live as long as it is called.
ShardPlacementFn asking_once(ShardPlacementFn function);

}  // namespace fsdp::internal
