// view(size) and its like, which reshape.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_reshape(OpTable& table);

}  // namespace fsdp::internal
