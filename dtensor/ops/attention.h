// Scaled dot product attention, fused, on CPUs, its gradient, and the choice of the
// kernel.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_attention(OpTable& table);

}  // namespace fsdp::internal
