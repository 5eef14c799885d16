// Views of DTensors. A view of the local tensor is made and wrapped, so writes through it reach the original. Shards
// follow their dimension; a view that would need another cut throws.
#include "dtensor/dtensor_impl.h"
#include "dtensor/redistribute.h"
#include "dtensor/rules.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/InferSize.h>
#include <c10/core/WrapDimMinimal.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

namespace fsdp::internal {
namespace {

// The same DTensor in a new tensor object, owner and all.
at::Tensor aliased(const at::Tensor& self) { return make_dtensor_view(self, local_of(self), spec_of(self)); }

void alias_rule(OperatorCall& call) { call.finish(aliased(call.argument(0).toTensor())); }

// Global geometry after the view, from the operator itself on a tensor without memory.
at::Tensor viewed_geometry(OperatorCall& call, const at::Tensor& self, torch::jit::Stack arguments) {
  arguments[0] = at::empty_strided(self.sizes(), self.strides(), self.options().device(c10::kMeta));
  call.handle().callBoxed(&arguments);
  return arguments[0].toTensor();
}

// Where each tensor dimension goes; -1: away.
using DimMap = std::function<int64_t(int64_t dim)>;

void finish_view(OperatorCall& call, const DimMap& dim_map) {
  const at::Tensor self = call.argument(0).toTensor();
  const at::Tensor geometry = viewed_geometry(call, self, call.arguments());
  DTensorSpec spec = *spec_of(self);
  for (auto& placement : spec.placements) {
    if (!placement.is_shard()) continue;
    const int64_t dim = dim_map(placement.shard_dim());
    TORCH_CHECK_NOT_IMPLEMENTED(dim >= 0, call.description(), ": the view changes dimension ", placement.shard_dim(),
                                ", which is cut across ranks. Call .redistribute({Replicate()}) or .full_tensor() "
                                "first (collective), or work on .to_local().");
    placement = Shard{dim};
  }
  spec.shape = geometry.sizes().vec();
  spec.stride = geometry.strides().vec();
  auto interned = intern_spec(std::move(spec));
  call.argument(0) = local_of(self);
  auto results = call.run();
  call.finish(make_dtensor_view(self, results[0].toTensor(), std::move(interned)));
}

int64_t wrapped(const c10::IValue& dim, int64_t ndim) { return c10::maybe_wrap_dim(dim.toInt(), ndim); }

void transpose_rule(OperatorCall& call) {
  const int64_t ndim = call.argument(0).toTensor().dim();
  const bool is_t = call.argument_count() == 1;
  const int64_t a = is_t ? 0 : wrapped(call.argument(1), ndim);
  const int64_t b = is_t ? ndim - 1 : wrapped(call.argument(2), ndim);
  finish_view(call, [=](int64_t d) { return d == a ? b : d == b ? a : d; });
}

void permute_rule(OperatorCall& call) {
  const int64_t ndim = call.argument(0).toTensor().dim();
  auto order = call.argument(1).toIntVector();
  for (int64_t& d : order) d = c10::maybe_wrap_dim(d, ndim);
  finish_view(call, [order](int64_t d) { return std::find(order.begin(), order.end(), d) - order.begin(); });
}

void unsqueeze_rule(OperatorCall& call) {
  const int64_t at = c10::maybe_wrap_dim(call.argument(1).toInt(), call.argument(0).toTensor().dim() + 1);
  finish_view(call, [at](int64_t d) { return d >= at ? d + 1 : d; });
}

// select: the dimension goes away.
void select_rule(OperatorCall& call) {
  const int64_t at = wrapped(call.argument(1), call.argument(0).toTensor().dim());
  finish_view(call, [at](int64_t d) { return d == at ? -1 : d > at ? d - 1 : d; });
}

// slice: the dimension stays but is another.
void slice_rule(OperatorCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  const int64_t at = wrapped(call.argument(1), self.dim());
  if (viewed_geometry(call, self, call.arguments()).sizes() == self.sizes()) return call.finish(aliased(self));
  finish_view(call, [at](int64_t d) { return d == at ? -1 : d; });
}

// Dimensions of size 1 go away; shards of them only where nothing is cut.
void squeeze_rule(OperatorCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  std::vector<bool> gone(static_cast<size_t>(self.dim()), call.argument_count() == 1);
  if (call.argument_count() > 1) {
    const auto given = call.argument(1).isInt() ? std::vector<int64_t>{call.argument(1).toInt()}
                                                : call.argument(1).toIntVector();
    for (int64_t d : given) {
      if (self.dim() > 0) gone[static_cast<size_t>(c10::maybe_wrap_dim(d, self.dim()))] = true;
    }
  }
  std::vector<int64_t> kept;
  for (int64_t d = 0; d < self.dim(); ++d) {
    if (!gone[static_cast<size_t>(d)] || self.size(d) != 1) kept.push_back(d);
  }
  const auto& placements = spec_of(self)->placements;
  const bool empty_parts = std::any_of(placements.begin(), placements.end(), [&](const auto& placement) {
    return placement.is_shard() && self.size(placement.shard_dim()) == 1;
  });
  TORCH_CHECK_NOT_IMPLEMENTED(!empty_parts, call.description(), ": a dimension of size 1 is cut across ranks. Call "
                              ".redistribute({Replicate()}) first (collective).");
  finish_view(call, [kept](int64_t d) {
    const auto it = std::find(kept.begin(), kept.end(), d);
    return it == kept.end() ? -1 : it - kept.begin();
  });
}

void expand_rule(OperatorCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  auto size = call.argument(1).toIntVector();
  const int64_t shift = static_cast<int64_t>(size.size()) - self.dim();
  for (const auto& placement : spec_of(self)->placements) {
    if (!placement.is_shard()) continue;
    const auto at = static_cast<size_t>(placement.shard_dim() + shift);
    const bool same = size[at] == -1 || size[at] == self.size(placement.shard_dim());
    TORCH_CHECK_NOT_IMPLEMENTED(same, call.description(), ": a dimension cut across ranks cannot be expanded. Call "
                                ".redistribute({Replicate()}) first (collective).");
  }
  const at::Tensor geometry = viewed_geometry(call, self, call.arguments());
  DTensorSpec spec = *spec_of(self);
  for (auto& placement : spec.placements) {
    if (!placement.is_shard()) continue;
    size[static_cast<size_t>(placement.shard_dim() + shift)] = -1;
    placement = Shard{placement.shard_dim() + shift};
  }
  spec.shape = geometry.sizes().vec();
  spec.stride = geometry.strides().vec();
  auto interned = intern_spec(std::move(spec));
  call.argument(0) = local_of(self);
  call.argument(1) = size;
  auto results = call.run();
  call.finish(make_dtensor_view(self, results[0].toTensor(), std::move(interned)));
}

int64_t product(const std::vector<int64_t>& sizes, size_t begin, size_t end) {
  return std::accumulate(sizes.begin() + static_cast<std::ptrdiff_t>(begin),
                         sizes.begin() + static_cast<std::ptrdiff_t>(end), int64_t{1}, std::multiplies<>());
}

// The dimension of `after` whose chunks are exactly those of dimension `dim` of `before`, or -1.
int64_t same_chunks(const std::vector<int64_t>& before, size_t dim, const std::vector<int64_t>& after, int64_t parts) {
  for (size_t d = 0; d < after.size(); ++d) {
    if (product(after, 0, d) != product(before, 0, dim)) continue;
    const int64_t row_before = product(before, dim + 1, before.size());
    const int64_t row_after = product(after, d + 1, after.size());
    bool same = true;
    for (int64_t i = 0; i < parts && same; ++i) {
      same = chunk_of(before[dim], parts, i).length * row_before == chunk_of(after[d], parts, i).length * row_after;
    }
    if (same) return static_cast<int64_t>(d);
  }
  return -1;
}

// view, reshape: legal where the new shape has a dimension with the same chunks.
void view_rule(OperatorCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  const auto wanted = at::infer_size(call.argument(1).toIntVector(), self.numel());
  const std::vector<int64_t> after(wanted.begin(), wanted.end());
  if (after == spec_of(self)->shape) return call.finish(aliased(self));
  const at::Tensor geometry = at::empty_strided(self.sizes(), self.strides(), self.options().device(c10::kMeta));
  DTensorSpec spec = *spec_of(self);
  const auto before = spec.shape;
  std::vector<bool> cut(before.size(), false);
  for (size_t m = 0; m < spec.placements.size(); ++m) {
    auto& placement = spec.placements[m];
    if (!placement.is_shard()) continue;
    const auto dim = static_cast<size_t>(placement.shard_dim());
    const int64_t target = cut[dim] ? -1 : same_chunks(before, dim, after, spec.mesh.size(static_cast<int64_t>(m)));
    TORCH_CHECK_NOT_IMPLEMENTED(target >= 0, call.description(), " to ", at::IntArrayRef(after), ": dimension ", dim,
                                " is cut across ranks and the new shape has no dimension with the same chunks. Call "
                                ".redistribute({Replicate()}) or .full_tensor() first (collective).");
    cut[dim] = true;
    placement = Shard{target};
  }
  spec.shape = after;
  spec.stride = geometry.view(after).strides().vec();
  auto interned = intern_spec(std::move(spec));
  std::vector<int64_t> local_shape;
  for (const Chunk& chunk : local_box(*interned)) local_shape.push_back(chunk.length);
  call.finish(make_dtensor_view(self, local_of(self).view(local_shape), std::move(interned)));
}

void as_strided_rule(OperatorCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  const bool same = call.argument(1).toIntVector() == spec_of(self)->shape &&
                    call.argument(2).toIntVector() == spec_of(self)->stride &&
                    (call.argument(3).isNone() || call.argument(3).toInt() == 0);
  TORCH_CHECK_NOT_IMPLEMENTED(same, call.description(), ": a DTensor has no memory to stride over. Use .to_local() or "
                              ".full_tensor() (collective).");
  call.finish(aliased(self));
}

}  // namespace

void add_view_rules(RuleTable& table) {
  for (const char* name : {"detach", "alias"}) table[name] = alias_rule;
  for (const char* name : {"t", "transpose.int"}) table[name] = transpose_rule;
  for (const char* name : {"view.", "_unsafe_view", "_reshape_alias"}) table[name] = view_rule;
  for (const char* name : {"squeeze.", "squeeze.dim", "squeeze.dims"}) table[name] = squeeze_rule;
  table["permute"] = permute_rule;
  table["unsqueeze"] = unsqueeze_rule;
  table["select.int"] = select_rule;
  table["slice.Tensor"] = slice_rule;
  table["expand"] = expand_rule;
  table["as_strided."] = as_strided_rule;
}

}  // namespace fsdp::internal
