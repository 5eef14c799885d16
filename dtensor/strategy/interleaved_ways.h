// Ways along interleaved cuts. Which elements of a dimension a rank has does not matter
// to an operator, as long as all that is cut alike has the same: so a way of plain cuts
// is one of interleaved cuts too. No torch here.
#pragma once

#include "dtensor/strategy/call_geometry.h"
#include "dtensor/strategy/way.h"

#include <vector>

namespace fsdp::internal {

// `ways`, and each of them once more for every interleaved cut among those that arrive
// that lets an operand stay where it is. Not where dimensions of several lengths are cut,
// which then do not go together element by element, nor for ways that are interleaved.
std::vector<Way> with_interleaved_ways(std::vector<Way> ways, const CallGeometry& call);

}  // namespace fsdp::internal
