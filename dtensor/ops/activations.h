// log_sigmoid, prelu and glu, and their gradients.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_activations(OpTable& table);

}  // namespace fsdp::internal
