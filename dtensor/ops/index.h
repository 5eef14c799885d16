// Reading and writing at indices (index, index_select, gather, index_put, index_fill,
// index_copy, index_add), and the gradients of views that read a part.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_index(OpTable& table);

}  // namespace fsdp::internal
