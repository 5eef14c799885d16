// What stands in a member's .grad after a backward: the right shape, and an error when it
// is touched. An optimizer built before fully_shard holds members; without this it would
// find no gradients and silently do nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp::internal {

class ParamGroup;

// Of the shape and dtype of `member`, parameter `index` of `group` (not kept alive).
// Touching it drops what was written to the group's unsharded copy and throws ValueError.
// Local.
at::Tensor make_tripwire(const at::Tensor& member, ParamGroup& group, int64_t index);
bool is_tripwire(const at::Tensor& gradient);

// Takes a tripwire off `member` before autograd accumulates into its .grad.
void remove_tripwire_before_accumulation(const at::Tensor& member);

}  // namespace fsdp::internal
