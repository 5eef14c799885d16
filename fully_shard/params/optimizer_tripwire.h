// What stands in a member's .grad after a backward: the right shape, and an error when it
// is touched. An optimizer built before fully_shard holds members; without this it would
// find no gradients and silently do nothing.
//
// Inside a backward it is no error but zeros: a second backward through a retained graph
// adds to it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp::internal {

class ParamGroup;

// Of the shape and dtype of `member`, parameter `index` of `group` (not kept alive).
// Touching it outside a backward drops what was written to the group's unsharded copy and
// throws ValueError. Local.
at::Tensor make_tripwire(const at::Tensor& member, ParamGroup& group, int64_t index);
// A tripwire that no backward has added to.
bool is_untouched_tripwire(const at::Tensor& gradient);

}  // namespace fsdp::internal
