// _foreach_norm: the norms of many tensors.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_foreach_norm(OpTable& table);

}  // namespace fsdp::internal
