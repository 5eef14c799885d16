// Tells a group that autograd has delivered the gradient of one of its members.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp::internal {

class FSDPParamGroup;

void set_gradient_hook(const at::Tensor& member, c10::intrusive_ptr<FSDPParamGroup> group,
                       int64_t index);

}  // namespace fsdp::internal
