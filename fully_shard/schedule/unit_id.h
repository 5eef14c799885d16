// The number by which the schedule knows a unit, so that it needs neither modules nor
// tensors.
#pragma once

#include <cstdint>

namespace fsdp::internal {

// Numbers units in the order in which fully_shard made them; unique in the process.
using UnitId = int64_t;

}  // namespace fsdp::internal
