// Losses of elements, and their gradients: mse_loss, smooth_l1_loss, huber_loss,
// soft_margin_loss, binary_cross_entropy, with logits too.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_elementwise_loss(OpTable& table);

}  // namespace fsdp::internal
