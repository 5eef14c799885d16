// In place they may meet plain zeros that autograd's formulas make where they mean a
// DTensor, as the gradients of max(dim), sort and topk do: the zeros become one.
#include "dtensor/dtensor.h"
#include "dtensor/ops/families.h"
#include "dtensor/ops/op_table.h"
#include "dtensor/redistribute/differentiable.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/strategy/index_strategy.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <c10/core/WrapDimMinimal.h>

#include <algorithm>
#include <vector>

namespace fsdp::internal {
namespace {

// scatter(self, dim, index, source or number)
std::vector<PlacementStrategy> scatter_strategy(const OpSchema& call) {
  return equal_dims_strategy(call, wrapped_dim(call.number(1), call.operands[0].ndim()));
}

// scatter_add(self, dim, index, source) adds terms to terms.
std::vector<PlacementStrategy> scatter_add_strategy(const OpSchema& call) {
  auto strategies = scatter_strategy(call);
  for (const auto op : {Partial::Op::kSum, Partial::Op::kAvg})
    strategies.push_back({{Partial{op}}, {Partial{op}, Replicate{}, Partial{op}}});
  return strategies;
}

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

// scatter_(self, dim, index, source or number)
void scatter_in_place(OperatorCall& call, const StrategyKernel* by_strategy) {
  const at::Tensor self = call.argument(0).toTensor();
  if (!is_dtensor(self) && inside_backward()) {
    const auto tensors = call.tensors();
    const auto model = std::find_if(tensors.begin(), tensors.end(), is_dtensor);
    become_dtensor(self, spec_of(*model),
                   c10::maybe_wrap_dim(call.argument(1).toInt(), self.dim()));
  }
  by_strategy->run(call);
}

}  // namespace

void add_scatter(OpTable& table) {
  const OpStrategy put{.strategies = scatter_strategy, .results = results_as_self};
  for (const char* name : {"scatter.src", "scatter.value"}) table.add(name, {.strategy = put});
  for (const char* name : {"scatter_.src", "scatter_.value"})
    table.add(name, {.strategy = put, .handler = scatter_in_place});
  const OpStrategy added{.strategies = scatter_add_strategy, .results = results_as_self};
  table.add("scatter_add.", {.strategy = added});
  table.add("scatter_add_.", {.strategy = added, .handler = scatter_in_place});
}

}  // namespace fsdp::internal
