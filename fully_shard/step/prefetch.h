// Issues gathers that a schedule decided on, ahead of the touches. Collective, in the
// order given.
#pragma once

#include "fully_shard/schedule/unit_id.h"
#include "fully_shard/units/root.h"

#include <vector>

namespace fsdp::internal {

// Units without a group have nothing to gather.
void prefetch(Root& root, const std::vector<UnitId>& units);
// What a unit of `root` put off until its gradients left, whether they have or not:
// before any other gather, and before the end of the backward.
void prefetch_put_off(Root& root);

}  // namespace fsdp::internal
