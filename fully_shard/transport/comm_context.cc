#include "fully_shard/transport/comm_context.h"

#include "fully_shard/transport/mesh_dims.h"

#include <c10/util/Exception.h>

namespace fsdp::internal {

CommContext::CommContext(const DeviceMesh& mesh)
    : transport_(std::make_unique<Transport>(mesh, shard_mesh_dim(mesh))),
      global_rank_(mesh.rank()) {}

ReduceStream& CommContext::reduce_stream(c10::Device device) {
  if (!reduce_stream_) reduce_stream_.emplace(device);
  TORCH_INTERNAL_ASSERT(reduce_stream_->device() == device);
  return *reduce_stream_;
}

}  // namespace fsdp::internal
