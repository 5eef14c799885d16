// Issues gathers that a schedule decided on, ahead of the touches. Collective, in the
// order given.
#pragma once

#include "fully_shard/schedule/unit_id.h"
#include "fully_shard/units/root.h"

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

}  // namespace fsdp::internal
