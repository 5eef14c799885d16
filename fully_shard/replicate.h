// Units whose parameters every rank has whole: data parallelism as torch's replicate()
// and DDP do it, beside units that are sharded.
//
//   fsdp::replicate(model->norm, mesh);   // small: not worth a gather
//   fsdp::fully_shard(model, mesh);
#pragma once

#include "device_mesh/device_mesh.h"
#include "fully_shard/fsdp_module.h"
#include "fully_shard/policies.h"

#include <memory>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
template <typename Contained>
class ModuleHolder;
}  // namespace torch::nn

namespace fsdp {

// As fully_shard, but that no rank gives a part of the parameters away: nothing is
// gathered, and gradients are summed by one all-reduce per backward. A unit of hybrid
// sharding over a mesh of as many replicas as `mesh` has ranks, one shard each, so all of
// FSDPModule's switches hold. The first call on a mesh is collective over it, later ones
// are local. Throws ValueError for a mesh of more than one dimension, and what
// fully_shard throws.
FSDPModule replicate(const std::vector<torch::nn::Module*>& modules,
                     const DeviceMesh& mesh = default_mesh(), FullyShardOptions options = {});
FSDPModule replicate(torch::nn::Module& module, const DeviceMesh& mesh = default_mesh(),
                     FullyShardOptions options = {});

template <class Contained>
FSDPModule replicate(const std::shared_ptr<Contained>& module,
                     const DeviceMesh& mesh = default_mesh(), FullyShardOptions options = {}) {
  return replicate(std::vector<torch::nn::Module*>{module.get()}, mesh, std::move(options));
}
template <class Contained>
FSDPModule replicate(const torch::nn::ModuleHolder<Contained>& module,
                     const DeviceMesh& mesh = default_mesh(), FullyShardOptions options = {}) {
  return replicate(module.ptr(), mesh, std::move(options));
}

}  // namespace fsdp
