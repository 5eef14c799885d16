// Tells of forwards whose order of units is another than the last time
// (DebugOptions::order_changes).
#pragma once

#include "fully_shard/units/root.h"

#include <cstdint>

namespace fsdp::internal {

// Warns of what the root's schedule found since the last call, once for each root. Local.
void warn_of_order_change(Root& root, int64_t global_rank);

}  // namespace fsdp::internal
