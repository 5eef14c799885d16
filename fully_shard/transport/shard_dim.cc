#include "fully_shard/transport/shard_dim.h"

#include "fully_shard/transport/mesh_dims.h"

namespace fsdp::internal {

ShardDim::ShardDim(const DeviceMesh& mesh)
    : transport_(make_transport(mesh, shard_dim_of(mesh))), global_rank_(mesh.rank()) {}

}  // namespace fsdp::internal
