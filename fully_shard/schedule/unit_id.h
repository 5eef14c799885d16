#pragma once

#include <cstdint>

namespace fsdp::internal {

// Numbers units in the order in which fully_shard made them; unique in the process.
using UnitId = int64_t;

}  // namespace fsdp::internal
