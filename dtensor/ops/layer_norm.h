// native_layer_norm, and its gradient.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_layer_norm(OpTable& table);

}  // namespace fsdp::internal
