// Reshaping views of DTensors. A cut stays where some dimension of the new shape has each
// rank's elements, in blocks and atoms if need be; else the view is one of a gathered
// copy, which can not be written.
#include "dtensor/families/rules.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/gathered_view.h"
#include "dtensor/ways/viewed_cut.h"

#include <ATen/InferSize.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

// The placements by which a tensor that lies as `spec` can be viewed as [after], and
// those of the view.
struct Viewed {
  std::vector<Placement> from, to;
};

// The mesh dimension before `m` that cuts the same tensor dimension, and still does.
std::optional<size_t> cut_around(const Viewed& viewed, size_t m) {
  const int64_t dim = viewed.from[m].shard_dim();
  for (size_t around = 0; around < m; ++around) {
    if (viewed.from[around].is_shard(dim)) return around;
  }
  return std::nullopt;
}

// A chunk of a chunk is the same one where the view leaves the dimension as it is.
std::optional<Placement> cut_inside(const Viewed& viewed, size_t m, size_t around,
                                    const DTensorSpec& spec, const std::vector<int64_t>& after) {
  const Placement& outer = viewed.to[around];
  if (!outer.is_shard()) return std::nullopt;
  const auto before_dim = static_cast<size_t>(viewed.from[m].shard_dim());
  const auto after_dim = static_cast<size_t>(outer.shard_dim());
  const bool stays = spec.shape()[before_dim] == after[after_dim] &&
                     viewed.from[around].along(outer.shard_dim()) == outer;
  return stays ? std::optional(viewed.from[m].along(outer.shard_dim())) : std::nullopt;
}

bool is_cut_along(const std::vector<Placement>& placements, size_t count, int64_t dim) {
  return std::any_of(placements.begin(), placements.begin() + static_cast<std::ptrdiff_t>(count),
                     [dim](const auto& placement) { return placement.is_shard(dim); });
}

// Mesh dimension `m`'s cut after the view; nothing where no dimension keeps it.
std::optional<Placement> viewed_placement(const Viewed& viewed, size_t m, const DTensorSpec& spec,
                                          const std::vector<int64_t>& after) {
  if (const auto around = cut_around(viewed, m)) return cut_inside(viewed, m, *around, spec, after);
  const int64_t ranks = spec.mesh().size(static_cast<int64_t>(m));
  const auto cut = viewed_cut(spec.shape(), after, viewed.from[m].shard(), ranks);
  if (!cut || is_cut_along(viewed.to, m, cut->dim)) return std::nullopt;
  if (ranks == 1 && Placement(*cut).is_interleaved()) return std::nullopt;
  return *cut;
}

// Where no dimension of the new shape keeps a cut, that mesh dimension replicates.
Viewed viewed_placements(const DTensorSpec& spec, const std::vector<int64_t>& after) {
  Viewed viewed{.from = spec.placements(), .to = spec.placements()};
  for (size_t m = 0; m < spec.placements().size(); ++m) {
    if (!viewed.from[m].is_shard()) continue;
    const auto kept = viewed_placement(viewed, m, spec, after);
    viewed.to[m] = kept.value_or(Replicate{});
    if (!kept && spec.mesh().size(static_cast<int64_t>(m)) > 1) viewed.from[m] = Replicate{};
  }
  return viewed;
}

// view, reshape.
void view_rule(OperatorCall& call) {
  const at::Tensor given = call.argument(0).toTensor();
  const auto wanted = at::infer_size(call.argument(1).toIntVector(), given.numel());
  const std::vector<int64_t> after(wanted.begin(), wanted.end());
  if (after == spec_of(given).shape())
    return call.finish(make_dtensor_view(given, local_of(given), spec_of(given)));
  auto placements = viewed_placements(spec_of(given), after);
  const at::Tensor self = gathered_for_view(call, given, placements.from);
  const at::Tensor geometry =
      at::empty_strided(self.sizes(), self.strides(), self.options().device(c10::kMeta));
  const DTensorSpec spec(spec_of(self).mesh(), std::move(placements.to), after,
                         geometry.view(after).strides().vec());
  const at::Tensor view = local_of(self).view(spec.local_shape());
  call.finish(make_dtensor_view(self, view, spec));
}

void as_strided_rule(OperatorCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  const bool same = call.argument(1).toIntVector() == spec_of(self).shape() &&
                    call.argument(2).toIntVector() == spec_of(self).stride() &&
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
