#include "dtensor/internal/whole_dims.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace fsdp::internal {

void check_whole_dims(const OperatorCall& call, const DTensorSpec& spec,
                      const std::vector<int64_t>& dims) {
  for (size_t m = 0; m < spec.placements.size(); ++m) {
    const Placement& placement = spec.placements[m];
    if (!placement.is_shard() || spec.mesh.size(static_cast<int64_t>(m)) == 1) continue;
    const bool whole = std::find(dims.begin(), dims.end(), placement.shard_dim()) == dims.end();
    TORCH_CHECK_NOT_IMPLEMENTED(
        whole, call.description(), ": dimension ", placement.shard_dim(), ", along which it ",
        "works, is cut across ranks. Call .redistribute({Replicate()}) or .full_tensor() first "
        "(collective).");
  }
}

}  // namespace fsdp::internal
