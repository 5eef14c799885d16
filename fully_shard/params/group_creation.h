// How a group comes to be: ordinary parameters become shards, members and registry
// entries.
#pragma once

#include "fully_shard/params/param_group.h"
#include "fully_shard/policies.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::internal {

struct NewParam {
  std::string name;
  at::Tensor tensor;
  int64_t sharded_dim = 0;
};

// Shards `params` (distinct, valid) over `mesh`: changes their tensors in place into
// members, on the mesh's device. Returns what the registry is to hold, in the same order;
// the group lives as long as one of these, or a member. Of `precision`: param_dtype,
// reduce_dtype and cast_forward_inputs. Local.
std::vector<at::Tensor> create_group(const DeviceMesh& mesh, std::shared_ptr<ShardDim> dim,
                                     std::shared_ptr<Transport> replicas,
                                     std::shared_ptr<Unit> unit,
                                     std::shared_ptr<GroupDriver> driver,
                                     const std::vector<NewParam>& params,
                                     const MixedPrecisionPolicy& precision);

}  // namespace fsdp::internal
