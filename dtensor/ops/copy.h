// Copies: clone, to(dtype), copy_ and set_.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_copy(OpTable& table);

}  // namespace fsdp::internal
