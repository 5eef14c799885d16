// What the ranks of a device mesh tell each other on the host at the end of a backward
// (fully_shard/host_exchange.h), first those that shard, then the replicas:
//
//   of the whole      whether gradients came late; a hash of the values that must be alike
//   of each group     who holds what was written since the last time
//   of each reduction which parameters were used; of those over replicas, whether this one wrote
//
// A rank that found something wrong among those that shard still tells its replicas, so
// no rank waits for one that has thrown.
#pragma once

#include "fully_shard/params/reduce_scatter.h"
#include "fully_shard/units/root.h"

#include <memory>
#include <set>
#include <span>

namespace fsdp::internal {

// Of all groups of `roots` on one process group, and of those reductions of theirs, which
// have been waited for: they learn which parameters were used, and what the replicas
// wrote. Returns whether gradients came late on some rank. Throws, on all ranks alike,
// what RankAgreement and HostExchange throw. Nothing, and `late`, where the ranks do not
// exchange anything. REQUIRES: reductions. Blocks; collective over the mesh.
bool exchange_after_backward(const std::set<std::shared_ptr<Root>>& roots,
                             std::span<GradientReduction> reductions, bool late);

}  // namespace fsdp::internal
