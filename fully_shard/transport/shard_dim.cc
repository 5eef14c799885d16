#include "fully_shard/transport/shard_dim.h"

namespace fsdp::internal {

ShardDim::ShardDim(const DeviceMesh& mesh)
    : transport_(make_transport(mesh, 0)), global_rank_(mesh.rank()) {}

}  // namespace fsdp::internal
