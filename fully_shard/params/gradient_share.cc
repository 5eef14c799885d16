#include "fully_shard/params/gradient_share.h"

#include "dtensor/redistribute/comm_listener.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/ops/zeros.h>

#include <cstddef>
#include <vector>

namespace fsdp::internal {
namespace {

// The first dimension of `mesh` that is the unit's: those are the last of it, or none.
int64_t first_dim_of_unit(const DeviceMesh& mesh, const DeviceMesh& unit_mesh) {
  if (mesh == unit_mesh) return 0;
  const auto first = mesh.ndim() - unit_mesh.ndim();
  if (first < 0) return mesh.ndim();
  for (int64_t dim = 0; dim < unit_mesh.ndim(); ++dim) {
    if (mesh.group(first + dim) != unit_mesh.group(dim)) return mesh.ndim();
  }
  return first;
}

// A half may overflow where it counts once per rank.
bool stays(const Placement& placement, at::ScalarType dtype) {
  if (placement.is_partial())
    return placement.partial_op() == Partial::Op::kAvg ||
           (placement.partial_op() == Partial::Op::kSum && dtype != at::kHalf);
  return placement.is_shard() && !placement.is_interleaved() && dtype != at::kHalf;
}

struct Share {
  std::vector<Placement> placements;  // of the part that this rank brings
  double times = 1;                   // it counts
};

Share share_of(const at::Tensor& gradient, const DeviceMesh& unit_mesh) {
  const auto& spec = spec_of(gradient);
  Share share{spec.replicated().placements()};
  for (auto dim = first_dim_of_unit(spec.mesh(), unit_mesh); dim < spec.mesh().ndim(); ++dim) {
    const auto& placement = spec.placements()[static_cast<size_t>(dim)];
    if (spec.mesh().size(dim) == 1 || !stays(placement, gradient.scalar_type())) continue;
    share.placements[static_cast<size_t>(dim)] = placement;
    const bool is_average = placement == Placement(Partial{Partial::Op::kAvg});
    if (!is_average) share.times *= static_cast<double>(spec.mesh().size(dim));
  }
  return share;
}

// Zeros around this rank's part.
at::Tensor at_its_place(const at::Tensor& part, const DTensorSpec& spec) {
  const auto cuts = spec.without_partials();
  if (cuts == spec.replicated()) return part;
  const auto whole = at::zeros(spec.shape(), part.options());
  local_part(whole, cuts).copy_(part);
  return whole;
}

}  // namespace

at::Tensor gradient_share(const at::Tensor& gradient, const DeviceMesh& unit_mesh) {
  const CommCauseScope cause(CommCause::kGradient);
  const auto share = share_of(gradient, unit_mesh);
  const auto part = redistribute_local(local_of(gradient), spec_of(gradient), share.placements);
  return at_its_place(share.times == 1 ? part : part.mul(share.times),
                      spec_of(gradient).with_placements(share.placements));
}

}  // namespace fsdp::internal
