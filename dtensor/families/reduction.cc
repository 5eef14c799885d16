#include "dtensor/families/reduction.h"

#include "dtensor/internal/shard_layout.h"

#include <c10/core/WrapDimMinimal.h>

#include <algorithm>

namespace fsdp::internal {

ReducedDims ReducedDims::all_of(const at::Tensor& self) {
  ReducedDims result;
  result.reduced.assign(static_cast<size_t>(self.dim()), true);
  for (int64_t d = 0; d < self.dim(); ++d) result.dims.push_back(d);
  return result;
}

ReducedDims ReducedDims::of(OperatorCall& call, const at::Tensor& self) {
  std::vector<int64_t> given;
  const c10::IValue* dim = call.find_argument("dim");
  if (dim != nullptr && dim->isIntList()) given = dim->toIntVector();
  if (dim != nullptr && dim->isInt()) given = {dim->toInt()};
  ReducedDims result = all_of(self);
  if (!given.empty()) {
    std::fill(result.reduced.begin(), result.reduced.end(), false);
    for (int64_t& d : given) {
      d = c10::maybe_wrap_dim(d, self.dim());
      if (self.dim() > 0) result.reduced[static_cast<size_t>(d)] = true;
    }
    std::erase_if(result.dims, [&](int64_t d) { return !result.reduced[static_cast<size_t>(d)]; });
  }
  const c10::IValue* keepdim = call.find_argument("keepdim");
  result.keepdim = keepdim != nullptr && keepdim->toBool();
  return result;
}

std::vector<int64_t> ReducedDims::shape_after(at::IntArrayRef shape) const {
  std::vector<int64_t> after;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (!reduced[d]) after.push_back(shape[d]);
    if (reduced[d] && keepdim) after.push_back(1);
  }
  return after;
}

int64_t ReducedDims::dim_after(int64_t dim) const {
  if (keepdim) return dim;
  return dim - std::count(reduced.begin(), reduced.begin() + dim, true);
}

int64_t ReducedDims::count(at::IntArrayRef shape) const {
  int64_t count = 1;
  for (int64_t d : dims) count *= shape[static_cast<size_t>(d)];
  return count;
}

bool crosses_ranks(const DTensorSpec& spec, const ReducedDims& dims) {
  return std::any_of(dims.dims.begin(), dims.dims.end(),
                     [&](int64_t dim) { return spec.is_cut(dim); });
}

DTensorSpec reduced_spec(const DTensorSpec& spec, const ReducedDims& dims,
                         const Placement& across) {
  auto placements = spec.placements();
  for (size_t m = 0; m < placements.size(); ++m) {
    if (!placements[m].is_shard()) continue;
    const int64_t dim = placements[m].shard_dim();
    if (!dims.reduced[dim]) {
      placements[m] = placements[m].along(dims.dim_after(dim));
    } else {
      const bool alone = spec.mesh().size(static_cast<int64_t>(m)) == 1;
      placements[m] = alone ? Placement(Replicate{}) : across;
    }
  }
  return {spec.mesh(), std::move(placements), dims.shape_after(spec.shape())};
}

}  // namespace fsdp::internal
