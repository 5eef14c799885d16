#include "dtensor/ops/row_statistics.h"

#include "dtensor/redistribute/comm_listener.h"
#include "dtensor/redistribute/redistribute.h"

#include <algorithm>

namespace fsdp::internal {

bool cuts_one_of(const DTensorSpec& spec, size_t m, const std::vector<int64_t>& dims) {
  const Placement& placement = spec.placements()[m];
  return placement.is_shard() && spec.mesh().shape()[m] > 1 &&
         std::count(dims.begin(), dims.end(), placement.shard_dim()) > 0;
}

at::Tensor summed_across(const at::Tensor& own, const DTensorSpec& spec,
                         const std::vector<int64_t>& dims) {
  std::vector<Placement> terms(spec.placements().size(), Replicate{});
  const auto whole = terms;
  for (size_t m = 0; m < terms.size(); ++m) {
    if (cuts_one_of(spec, m, dims)) terms[m] = Partial{};
  }
  const CommCauseScope cause(CommCause::kExchange);
  return redistribute_local(own, DTensorSpec(spec.mesh(), terms, own.sizes().vec()), whole);
}

at::Tensor gathered_across(const at::Tensor& own, const DeviceMesh& mesh, size_t m) {
  auto shape = own.sizes().vec();
  shape.insert(shape.begin(), mesh.shape()[m]);
  std::vector<Placement> cut(static_cast<size_t>(mesh.ndim()), Replicate{});
  const auto whole = cut;
  cut[m] = Shard{0};
  const CommCauseScope cause(CommCause::kExchange);
  return redistribute_local(own.unsqueeze(0), DTensorSpec(mesh, cut, shape), whole);
}

}  // namespace fsdp::internal
