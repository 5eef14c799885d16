// Reshaping views of DTensors. A cut dimension stays cut where it has a counterpart with
// the same chunks; else the view is one of a gathered copy, which can not be written.
#include "dtensor/families/rules.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/gathered_view.h"

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

// The placements by which a tensor that lies as `spec` can be viewed as [after], and
// those of the view.
struct Viewed {
  std::vector<Placement> from, to;
};

// Where no dimension of the new shape has the chunks of a cut one, that mesh dimension
// replicates.
Viewed viewed_placements(const DTensorSpec& spec, const std::vector<int64_t>& after) {
  Viewed viewed{.from = spec.placements, .to = spec.placements};
  std::vector<int64_t> target_of(spec.shape.size(), -1);  // by cut dimension
  for (size_t m = 0; m < spec.placements.size(); ++m) {
    if (!viewed.from[m].is_shard()) continue;
    const auto dim = static_cast<size_t>(viewed.from[m].shard_dim());
    const int64_t parts = spec.mesh.size(static_cast<int64_t>(m));
    const int64_t target = counterpart(spec.shape, dim, after, parts, target_of[dim]);
    if (target < 0) {
      if (parts > 1) viewed.from[m] = Replicate{};
      viewed.to[m] = Replicate{};
      continue;
    }
    target_of[dim] = target;
    viewed.to[m] = Shard{target};
  }
  return viewed;
}

// view, reshape.
void view_rule(OperatorCall& call) {
  const at::Tensor given = call.argument(0).toTensor();
  const auto wanted = at::infer_size(call.argument(1).toIntVector(), given.numel());
  const std::vector<int64_t> after(wanted.begin(), wanted.end());
  if (after == spec_of(given)->shape)
    return call.finish(make_dtensor_view(given, local_of(given), spec_of(given)));
  auto placements = viewed_placements(*spec_of(given), after);
  const at::Tensor self = gathered_for_view(call, given, placements.from);
  const at::Tensor geometry =
      at::empty_strided(self.sizes(), self.strides(), self.options().device(c10::kMeta));
  auto spec = intern_spec(
      {spec_of(self)->mesh, std::move(placements.to), after, geometry.view(after).strides().vec()});
  const at::Tensor view = local_of(self).view(spec->local_shape());
  call.finish(make_dtensor_view(self, view, std::move(spec)));
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
