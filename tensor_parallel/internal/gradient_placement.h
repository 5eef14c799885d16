// Gradients of members lie as the members: those cut alike stay, others are moved when
// they arrive, and what ranks hold as terms of a sum is summed at the end of the
// backward, for all members at once.
#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::internal {

// REQUIRES: `member` is a DTensor and a leaf. Its backwards are collective over its mesh.
void bring_gradients_home(const at::Tensor& member);

// Whether autograd is adding `more` to `gradient`, that of such a member from an earlier
// backward, and it is seen to here, since `more` lies elsewhere: terms are added at the
// end of the backward, with the others; all else is moved and added at once (collective).
bool is_accumulated_at_home(const at::Tensor& gradient, const at::Tensor& more);

}  // namespace fsdp::internal
