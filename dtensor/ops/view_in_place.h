// Views in place: squeeze_, unsqueeze_, t_ and transpose_.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_view_in_place(OpTable& table);

}  // namespace fsdp::internal
