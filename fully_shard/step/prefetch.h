// Issues gathers that a schedule decided on, ahead of the touches. Collective, in the
// order given.
#pragma once

#include "fully_shard/schedule/unit_tree.h"
#include "fully_shard/units/unit.h"

#include <cstdint>
#include <vector>

namespace fsdp::internal {

// Units without a group have nothing to gather.
void prefetch(Root& root, const std::vector<UnitId>& units);
// HFSDP: the first stale unit behind `unit`, in the order in which fully_shard made them,
// begins to put its inner shards together: a turn before their gather. Units are used in
// that order as a rule; where they are not, this costs a wait. Collective over the outer
// dimension.
void put_inner_shards_together_ahead(Root& root, UnitId unit);
// What a unit of `root` put off until its gradients left, whether they have or not:
// before any other gather, and before the end of the backward.
void prefetch_put_off(Root& root);

// Warns of a forward whose order of units is another than the last time
// (DebugOptions::order_changes), which the root's schedule found since the last call;
// once for each root. Local.
void warn_of_order_change(Root& root, int64_t global_rank);

}  // namespace fsdp::internal
