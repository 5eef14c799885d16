// native_batch_norm, and its gradient.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_batch_norm(OpTable& table);

}  // namespace fsdp::internal
