// Reshaping views of DTensors: legal where each cut dimension has a counterpart with the
// same chunks.
#include "dtensor/families/rules.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/redistribute.h"

#include <ATen/InferSize.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <functional>
#include <numeric>
#include <utility>

namespace fsdp::internal {
namespace {

int64_t product(const std::vector<int64_t>& sizes, size_t begin, size_t end) {
  return std::accumulate(sizes.begin() + static_cast<std::ptrdiff_t>(begin),
                         sizes.begin() + static_cast<std::ptrdiff_t>(end), int64_t{1},
                         std::multiplies<>());
}

// The dimension of `after` whose chunks are exactly those of dimension `dim` of `before`,
// or -1.
int64_t same_chunks(const std::vector<int64_t>& before, size_t dim,
                    const std::vector<int64_t>& after, int64_t parts) {
  for (size_t d = 0; d < after.size(); ++d) {
    if (product(after, 0, d) != product(before, 0, dim)) continue;
    const int64_t row_before = product(before, dim + 1, before.size());
    const int64_t row_after = product(after, d + 1, after.size());
    bool same = true;
    for (int64_t i = 0; i < parts && same; ++i) {
      same = chunk_of(before[dim], parts, i).length * row_before ==
             chunk_of(after[d], parts, i).length * row_after;
    }
    if (same) return static_cast<int64_t>(d);
  }
  return -1;
}

// The same for a dimension that another mesh dimension may have cut already and that then
// became `cut_already`. Chunks of chunks are the same where the sizes are.
int64_t counterpart(const std::vector<int64_t>& before, size_t dim,
                    const std::vector<int64_t>& after, int64_t parts, int64_t cut_already) {
  const int64_t target = same_chunks(before, dim, after, parts);
  if (cut_already < 0 || target < 0) return target;
  const bool same_size = before[dim] == after[static_cast<size_t>(target)];
  return target == cut_already && same_size ? target : -1;
}

// view, reshape: legal where the new shape has a dimension with the same chunks.
void view_rule(OperatorCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  const auto wanted = at::infer_size(call.argument(1).toIntVector(), self.numel());
  const std::vector<int64_t> after(wanted.begin(), wanted.end());
  if (after == spec_of(self)->shape)
    return call.finish(make_dtensor_view(self, local_of(self), spec_of(self)));
  const at::Tensor geometry =
      at::empty_strided(self.sizes(), self.strides(), self.options().device(c10::kMeta));
  DTensorSpec spec = *spec_of(self);
  const auto before = spec.shape;
  std::vector<int64_t> target_of(before.size(), -1);  // by cut dimension
  for (size_t m = 0; m < spec.placements.size(); ++m) {
    auto& placement = spec.placements[m];
    if (!placement.is_shard()) continue;
    const auto dim = static_cast<size_t>(placement.shard_dim());
    const int64_t parts = spec.mesh.size(static_cast<int64_t>(m));
    const int64_t target = counterpart(before, dim, after, parts, target_of[dim]);
    if (target < 0 && parts == 1) {
      placement = Replicate{};
      continue;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        target >= 0, call.description(), " to ", at::IntArrayRef(after), ": dimension ", dim,
        " is cut across ranks and the new shape has no dimension with the same chunks. Call "
        ".redistribute({Replicate()}) or .full_tensor() first (collective). What flattens "
        "parameters (torch::optim::LBFGS, parameters_to_vector) needs them replicated.");
    target_of[dim] = target;
    placement = Shard{target};
  }
  spec.shape = after;
  spec.stride = geometry.view(after).strides().vec();
  auto interned = intern_spec(std::move(spec));
  const at::Tensor view = local_of(self).view(interned->local_shape());
  call.finish(make_dtensor_view(self, view, std::move(interned)));
}

void as_strided_rule(OperatorCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  const bool same = call.argument(1).toIntVector() == spec_of(self)->shape &&
                    call.argument(2).toIntVector() == spec_of(self)->stride &&
                    (call.argument(3).isNone() || call.argument(3).toInt() == 0);
  TORCH_CHECK_NOT_IMPLEMENTED(same, call.description(),
                              ": a DTensor has no memory to stride over. Use .to_local() or "
                              ".full_tensor() (collective).");
  call.finish(make_dtensor_view(self, local_of(self), spec_of(self)));
}

}  // namespace

void add_reshape_rules(RuleTable& table) {
  for (const char* name : {"view.", "_unsafe_view", "_reshape_alias"}) table[name] = view_rule;
  table["as_strided."] = as_strided_rule;
}

}  // namespace fsdp::internal
