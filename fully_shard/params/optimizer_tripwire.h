// What stands in a member's .grad after a backward: the right shape, and an error when it
// is touched. An optimizer built before fully_shard holds members; without this it would
// find no gradients and silently do nothing.
//
// Inside a backward it is no error but zeros: a second backward through a retained graph
// adds to it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

namespace fsdp::internal {

class ShardWrites;

// Of the shape and dtype of `member`, the parameter `name`. Touching it outside a
// backward discards what was written to the group's unsharded copy, by `writes`, and
// throws ValueError. Local.
at::Tensor make_tripwire(const at::Tensor& member, const std::string& name,
                         std::weak_ptr<ShardWrites> writes);
// A tripwire that no backward has added to.
bool is_untouched_tripwire(const at::Tensor& gradient);

}  // namespace fsdp::internal
