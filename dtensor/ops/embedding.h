// embedding, and the gradient of its table.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_embedding(OpTable& table);

}  // namespace fsdp::internal
