// cat and stack.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_join(OpTable& table);

}  // namespace fsdp::internal
