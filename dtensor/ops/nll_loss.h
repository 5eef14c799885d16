// nll_loss and nll_loss2d, and their gradients.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_nll_loss(OpTable& table);

}  // namespace fsdp::internal
