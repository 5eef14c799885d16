// How a group comes to be: ordinary parameters become shards, members and registry
// entries.
#pragma once

#include "fully_shard/params/param_group.h"
#include "fully_shard/policies.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace fsdp::internal {

// Shards `tensors` (distinct, valid) over `mesh`: changes them in place into members, on
// the mesh's device.
// Returns what the registry is to hold, in the same order; the group lives as long as one
// of these, or a member. Of `precision`: param_dtype, reduce_dtype and
// cast_forward_inputs. Local.
std::vector<at::Tensor> create_group(const DeviceMesh& mesh, std::shared_ptr<ShardDim> dim,
                                     std::shared_ptr<Transport> replicas,
                                     std::shared_ptr<Unit> unit,
                                     std::shared_ptr<GroupDriver> driver,
                                     const std::vector<at::Tensor>& tensors,
                                     const std::vector<std::string>& names,
                                     const MixedPrecisionPolicy& precision);

}  // namespace fsdp::internal
