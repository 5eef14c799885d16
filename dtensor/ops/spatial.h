// Pooling and interpolation, and their gradients.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_spatial(OpTable& table);

}  // namespace fsdp::internal
