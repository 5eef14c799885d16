// Scatters in place into plain zeros that autograd's formulas make where they mean a
// DTensor, as the gradients of max(dim), sort and topk do: the zeros become one.
#include "dtensor/dtensor.h"
#include "dtensor/families/rules.h"
#include "dtensor/internal/differentiable.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/redistribute.h"
#include "dtensor/internal/run_by_ways.h"
#include "dtensor/ways/table.h"

#include <c10/core/WrapDimMinimal.h>

#include <algorithm>
#include <vector>

namespace fsdp::internal {
namespace {

// As a tensor of the same shape, but whole along `dim`; terms are added up.
std::vector<Placement> placements_beside(const DTensorSpec& model, at::IntArrayRef shape,
                                         int64_t dim) {
  auto placements = without_partials(model.placements());
  for (Placement& placement : placements) {
    const bool fits = !placement.is_shard() ||
                      (placement.shard_dim() != dim && at::IntArrayRef(model.shape()) == shape);
    if (!fits) placement = Replicate{};
  }
  return placements;
}

// In place.
void become_dtensor(const at::Tensor& zeros, const DTensorSpec& model, int64_t dim) {
  const DTensorSpec spec(model.mesh(), placements_beside(model, zeros.sizes(), dim),
                         zeros.sizes().vec());
  const auto becomes = make_dtensor(local_part(zeros, spec).contiguous(), spec);
  zeros.unsafeGetTensorImpl()->shallow_copy_from(becomes.getIntrusivePtr());
}

constexpr const char* kNames[] = {"scatter_.src", "scatter_.value", "scatter_add_."};

// scatter_(self, dim, index, source or number)
template <size_t kind>
void scatter_in_place_rule(OperatorCall& call) {
  static const WaysKernel by_ways(*find_ways(kNames[kind]), call.handle());
  const at::Tensor self = call.argument(0).toTensor();
  if (!is_dtensor(self) && inside_backward()) {
    const auto tensors = call.tensors();
    const auto model = std::find_if(tensors.begin(), tensors.end(), is_dtensor);
    become_dtensor(self, spec_of(*model),
                   c10::maybe_wrap_dim(call.argument(1).toInt(), self.dim()));
  }
  by_ways.run(call);
}

}  // namespace

void add_scatter_rules(RuleTable& table) {
  table[kNames[0]] = scatter_in_place_rule<0>;
  table[kNames[1]] = scatter_in_place_rule<1>;
  table[kNames[2]] = scatter_in_place_rule<2>;
}

}  // namespace fsdp::internal
