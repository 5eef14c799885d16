// Changes dtypes of a parameter group in place: of a parameter with its shard
// (Module::to(dtype) on a sharded module), and of members (full precision in evaluation).
// Local.
#pragma once

#include "fully_shard/params/fsdp_param_group.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace fsdp::internal {

// Gives parameter `index` the dtype and this rank's part of `from`, which becomes what
// the registry entry is to be. Throws ValueError while a graph, a gradient or a pointer
// may still use the old one.
void change_dtype(FSDPParamGroup& group, int64_t index, const at::Tensor& from);

// Throws ValueError where a member can not have another dtype now, as for change_dtype().
void check_members_may_change(const FSDPParamGroup& group);
// The dtype of floating members; unset: that of their entries. Throws as the check, with
// nothing changed. REQUIRES: the group was made with a param_dtype.
void set_param_dtype(FSDPParamGroup& group, std::optional<at::ScalarType> dtype);

}  // namespace fsdp::internal
