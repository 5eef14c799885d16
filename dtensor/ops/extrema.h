// Extrema along a dimension with their places in it: max and min with `dim`, argmax,
// argmin and topk. Those without places (max and min of all elements, amax, amin,
// aminmax) are in reduction.h.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_extrema(OpTable& table);

}  // namespace fsdp::internal
