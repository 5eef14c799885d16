// Elementwise operators: arithmetic, comparisons, activations of one result and their
// gradients.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_pointwise(OpTable& table);

}  // namespace fsdp::internal
