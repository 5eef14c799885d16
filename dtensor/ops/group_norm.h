// native_group_norm, and its gradient.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_group_norm(OpTable& table);

}  // namespace fsdp::internal
