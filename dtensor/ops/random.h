// Operators that draw random numbers, and the gradients of those that drop or leak.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_random(OpTable& table);

}  // namespace fsdp::internal
