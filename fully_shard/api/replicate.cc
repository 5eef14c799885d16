#include "fully_shard/replicate.h"

#include "fully_shard/fully_shard.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace fsdp {
namespace {

// {replicas, one shard} over the ranks of `mesh`.
DeviceMesh of_replicas(const DeviceMesh& mesh) {
  TORCH_CHECK_VALUE(mesh.ndim() == 1, "replicate: the mesh is ", to_string(mesh),
                    "; it must have one dimension, over which parameters are replicated (rank ",
                    mesh.rank(), ")");
  return DeviceMesh::from_groups({mesh.group(0), mesh.neighbours(0, 1).group(0)},
                                 mesh.device_type(), mesh.ranks(), {mesh.size(), 1},
                                 {"replicate", "shard"});
}

}  // namespace

FSDPModule replicate(const std::vector<torch::nn::Module*>& modules, const DeviceMesh& mesh,
                     FullyShardOptions options) {
  return fully_shard(modules, of_replicas(mesh), std::move(options));
}

FSDPModule replicate(ModuleRef module, const DeviceMesh& mesh, FullyShardOptions options) {
  return replicate(std::vector<torch::nn::Module*>{module.get()}, mesh, std::move(options));
}

}  // namespace fsdp
