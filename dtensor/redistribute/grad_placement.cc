#include "dtensor/redistribute/grad_placement.h"

#include "device_mesh/on_mesh/mesh_collectives.h"
#include "dtensor/dtensor.h"
#include "dtensor/redistribute/comm_listener.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/ops/cat.h>

namespace fsdp::internal {
namespace {

bool travel_together(const at::Tensor& one, const at::Tensor& other) {
  return one.scalar_type() == other.scalar_type() && spec_of(one).mesh() == spec_of(other).mesh();
}

// Those at `places`. Collective.
void sum_alike(const std::vector<at::Tensor>& gradients, const std::vector<size_t>& places,
               std::vector<at::Tensor>& sums) {
  std::vector<at::Tensor> flat;
  for (const size_t i : places) flat.push_back(local_of(gradients[i]).reshape({-1}));
  const at::Tensor all = at::cat(flat);
  const DeviceMesh& mesh = spec_of(gradients[places[0]]).mesh();
  const auto bytes = static_cast<int64_t>(all.nbytes());
  const auto event = [&] {
    return CommEvent{.operator_name = {},
                     .cause = CommCause::kGradient,
                     .kind = CollectiveKind::kAllReduce,
                     .mesh = mesh,
                     .mesh_dim = 0,
                     .from = Partial{},
                     .to = Replicate{},
                     .shape = all.sizes().vec(),
                     .bytes = bytes};
  };
  issue_comm(bytes, event, [&] {
    collectives_of(mesh, 0).all_reduce(
        {.tensor = all, .what = "all-reduce of tensor-parallel gradients"});
  });
  int64_t offset = 0;
  for (const size_t i : places) {
    const int64_t length = gradients[i].numel();
    sums[i] = all.narrow(0, offset, length).view(gradients[i].sizes());
    offset += length;
  }
}

}  // namespace

bool is_sum_of_terms(const at::Tensor& gradient, const DTensorSpec& home) {
  return gradient.defined() && is_dtensor(gradient) && home.placements().size() == 1 &&
         home.placements()[0].is_replicate() && home.mesh().size() > 1 &&
         spec_of(gradient).placements()[0] == Placement(Partial{Partial::Op::kSum});
}

at::Tensor local_at_home(const at::Tensor& gradient, const DTensorSpec& home) {
  if (!is_dtensor(gradient)) return local_part(gradient, home);
  const CommCauseScope cause(CommCause::kGradient);
  return moved_part(gradient, home.placements());
}

std::vector<at::Tensor> sum_terms(const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> sums(gradients.size());
  for (size_t first = 0; first < gradients.size(); ++first) {
    if (sums[first].defined()) continue;
    std::vector<size_t> alike;
    for (size_t i = first; i < gradients.size(); ++i) {
      if (travel_together(gradients[first], gradients[i])) alike.push_back(i);
    }
    sum_alike(gradients, alike, sums);
  }
  return sums;
}

}  // namespace fsdp::internal
