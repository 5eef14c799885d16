// _foreach_ operators, which do to every tensor of a list what an elementwise operator
// does; and _foreach_max.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_foreach(OpTable& table);

}  // namespace fsdp::internal
