// What a view and its gradient take of a dimension. No torch here.
#pragma once

#include "dtensor/strategy/block_ranges.h"
#include "dtensor/strategy/call_geometry.h"

#include <optional>

namespace fsdp::internal {

// The elements that slice(self, dim, start, end, step) takes; nothing where a step leaves
// some out.
std::optional<Range> sliced_range(const CallGeometry& call);

}  // namespace fsdp::internal
