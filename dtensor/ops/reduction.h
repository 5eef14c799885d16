// Sums, means, products and extrema, any and all.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_reduction(OpTable& table);

}  // namespace fsdp::internal
