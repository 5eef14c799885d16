// A group unsharded by hand and held, outside the schedule's turns:
// FSDPModule::unshard(), SummonFullParams, Unsharded.
#pragma once

#include "fully_shard/params/fsdp_param_group.h"

namespace fsdp::internal {

// Issues the gather and returns. Collective.
void unshard_async(FSDPParamGroup& group);
// The same, and waits for it. Collective.
void unshard(FSDPParamGroup& group);
// Unsharded until release(), whatever the schedule says; nests. Collective unless
// unsharded.
void hold(FSDPParamGroup& group);
// The last one reshards. Local.
void release(FSDPParamGroup& group);
// The same, and what was written meanwhile need not be alike on all ranks: each rank's
// part of it goes to its shards. Local.
void release_own_parts(FSDPParamGroup& group);

}  // namespace fsdp::internal
