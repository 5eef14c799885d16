// Convolutions, and their gradients.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_convolution(OpTable& table);

}  // namespace fsdp::internal
