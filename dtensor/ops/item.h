// Operators that hand a C++ value to the caller: item(), equal() and allclose(); and the
// operators behind &, | and ^.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_item(OpTable& table);

}  // namespace fsdp::internal
