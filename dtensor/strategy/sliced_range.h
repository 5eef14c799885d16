// The range of a dimension that a slice and its gradient take. No torch here.
#pragma once

#include "dtensor/strategy/block_ranges.h"
#include "dtensor/strategy/op_schema.h"

#include <optional>

namespace fsdp::internal {

// The elements that slice(self, dim, start, end, step) takes; nothing where a step leaves
// some out.
std::optional<Range> sliced_range(const OpSchema& call);

}  // namespace fsdp::internal
