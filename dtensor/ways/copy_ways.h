// Copies of a tensor. No torch here.
#pragma once

#include "dtensor/ways/operator_ways.h"

#include <cstddef>

namespace fsdp::internal {

// Terms are copied as they are, but where the copy has another dtype, which rounds:
// rounding before a reduction is not rounding after it.
// `memory_format`: the place of the argument that says how the copy lies in memory.
OperatorWays copying(bool rounds, size_t memory_format);

}  // namespace fsdp::internal
