// Sums, means, products, any and all, and extrema without their places (the others:
// extrema.h).
#pragma once

namespace fsdp::internal {

class OpTable;

void add_reduction(OpTable& table);

}  // namespace fsdp::internal
