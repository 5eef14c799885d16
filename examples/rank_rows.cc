#include "examples/rank_rows.h"

#include "dtensor/dtensor.h"

#include <vector>

namespace examples {

at::Tensor rows_of_ranks(const at::Tensor& mine, const fsdp::DeviceMesh& mesh) {
  // Row r of a distributed [ranks, numbers] tensor is rank r's.
  const std::vector<fsdp::Placement> by_rank(static_cast<size_t>(mesh.ndim()), fsdp::Shard{0});
  return fsdp::from_local(mine.unsqueeze(0).to(mesh.device_type()), mesh, by_rank)
      .full_tensor()
      .cpu();
}

}  // namespace examples
