// softmax and log_softmax, and their gradients.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_softmax(OpTable& table);

}  // namespace fsdp::internal
