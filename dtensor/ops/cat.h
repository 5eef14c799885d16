// cat and stack.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_cat(OpTable& table);

}  // namespace fsdp::internal
