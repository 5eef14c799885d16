// Fused optimizer steps: one operator updates all parameters and states.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_fused_optimizers(OpTable& table);

}  // namespace fsdp::internal
