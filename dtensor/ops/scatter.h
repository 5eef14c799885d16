// scatter and scatter_add.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_scatter(OpTable& table);

}  // namespace fsdp::internal
