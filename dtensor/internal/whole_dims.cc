#include "dtensor/internal/whole_dims.h"

#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/note_redistribution.h"
#include "dtensor/internal/redistribute.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {

std::vector<Placement> placements_whole_along(const DTensorSpec& spec,
                                              const std::vector<int64_t>& dims) {
  auto placements = spec.placements();
  for (size_t m = 0; m < placements.size(); ++m) {
    if (!placements[m].is_shard() || spec.mesh().size(static_cast<int64_t>(m)) == 1) continue;
    if (std::count(dims.begin(), dims.end(), placements[m].shard_dim()) > 0)
      placements[m] = Replicate{};
  }
  return placements;
}

at::Tensor whole_along(const OperatorCall& call, size_t operand, const at::Tensor& tensor,
                       const std::vector<int64_t>& dims) {
  const DTensorSpec& from = spec_of(tensor);
  auto to = placements_whole_along(from, dims);
  if (from.placements() == to) return tensor;
  note_redistribution(call, operand, from, to, NotedRedistribution::Cause::kNoRule);
  return redistribute_dtensor(tensor, to);
}

void check_whole_dims(const OperatorCall& call, const DTensorSpec& spec,
                      const std::vector<int64_t>& dims) {
  for (int64_t dim : dims) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !spec.is_cut(dim), call.description(), ": dimension ", dim, ", along which it ",
        "writes, is cut across ranks. Call .redistribute({Replicate()}) or .full_tensor() first "
        "(collective).");
  }
}

}  // namespace fsdp::internal
