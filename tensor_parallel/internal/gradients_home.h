// Gradients of members lie as the members: those cut alike stay, others are moved when
// they arrive, and what ranks hold as terms of a sum is summed at the end of the
// backward, for all members at once.
#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::internal {

// REQUIRES: `member` is a DTensor and a leaf. Its backwards are collective over its mesh.
void bring_gradients_home(const at::Tensor& member);

}  // namespace fsdp::internal
