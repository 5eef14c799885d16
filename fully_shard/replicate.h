// Units whose parameters every rank has whole: data parallelism as torch's replicate()
// and DDP do it, beside units that are sharded.
//
//   fsdp::replicate(model->norm, mesh);   // small: not worth a gather
//   fsdp::fully_shard(model, mesh);
#pragma once

#include "device_mesh/api.h"
#include "device_mesh/device_mesh.h"
#include "device_mesh/module_ref.h"
#include "fully_shard/fsdp_module.h"
#include "fully_shard/policies.h"

#include <vector>

namespace torch::nn {
class Module;
}

namespace fsdp {

// As fully_shard, but that no rank gives a part of the parameters away: nothing is
// gathered, and gradients are summed by one all-reduce per backward. A unit of hybrid
// sharding over a mesh of as many replicas as `mesh` has ranks, one shard each, so all of
// FSDPModule's switches hold. The first call on a mesh is collective over it, later ones
// are local. Throws ValueError for a mesh of more than one dimension, and what
// fully_shard throws.
FSDP_API FSDPModule replicate(const std::vector<torch::nn::Module*>& modules,
                              const DeviceMesh& mesh = default_mesh(),
                              FullyShardOptions options = {});
FSDP_API FSDPModule replicate(ModuleRef module, const DeviceMesh& mesh = default_mesh(),
                              FullyShardOptions options = {});

}  // namespace fsdp
