// Views of DTensors. A view of the local tensor is made and wrapped, so writes through it
// reach the original. Shards follow their dimension, and whole blocks of it; where a view
// would need another cut, it is one of a gathered copy, which can not be written.
#include "dtensor/families/rules.h"
#include "dtensor/internal/block_views.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/gathered_view.h"
#include "dtensor/internal/whole_dims.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/WrapDimMinimal.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

// The same DTensor in a new tensor object, owner and all.
at::Tensor aliased(const at::Tensor& self) {
  return make_dtensor_view(self, local_of(self), spec_of(self));
}

void alias_rule(OperatorCall& call) { call.finish(aliased(call.argument(0).toTensor())); }

// Global geometry after the view, from the operator itself on a tensor without memory.
c10::IValue viewed_geometry(const OperatorCall& call, const at::Tensor& self,
                            torch::jit::Stack arguments) {
  arguments[0] = at::empty_strided(self.sizes(), self.strides(), self.options().device(c10::kMeta));
  call.handle().callBoxed(&arguments);
  return std::move(arguments[0]);
}

// Where each tensor dimension goes; -1: away.
using DimMap = std::function<int64_t(int64_t dim)>;

// `self` with the dimensions whole that go away. Collective where one is cut.
at::Tensor viewable(const OperatorCall& call, const at::Tensor& self, const DimMap& dim_map) {
  std::vector<int64_t> gone;
  for (int64_t d = 0; d < self.dim(); ++d) {
    if (dim_map(d) < 0) gone.push_back(d);
  }
  return gathered_for_view(call, self, placements_whole_along(spec_of(self), gone));
}

// Where `self`, which is viewable, lies after a view that gives it `geometry`.
DTensorSpec viewed_spec(const at::Tensor& self, const at::Tensor& geometry, const DimMap& dim_map) {
  auto placements = spec_of(self).placements();
  for (auto& placement : placements) {
    if (!placement.is_shard()) continue;
    const int64_t dim = dim_map(placement.shard_dim());
    placement = dim < 0 ? Placement(Replicate{}) : placement.along(dim);
  }
  return {spec_of(self).mesh(), std::move(placements), geometry.sizes().vec(),
          geometry.strides().vec()};
}

void finish_view(OperatorCall& call, const DimMap& dim_map) {
  const at::Tensor self = viewable(call, call.argument(0).toTensor(), dim_map);
  auto spec = viewed_spec(self, viewed_geometry(call, self, call.arguments()).toTensor(), dim_map);
  call.argument(0) = local_of(self);
  auto results = call.run();
  call.finish(make_dtensor_view(self, results[0].toTensor(), std::move(spec)));
}

// The same for operators that give a list of views.
void finish_views(OperatorCall& call, const DimMap& dim_map) {
  const at::Tensor self = viewable(call, call.argument(0).toTensor(), dim_map);
  std::vector<DTensorSpec> specs;
  for (const at::Tensor& geometry :
       viewed_geometry(call, self, call.arguments()).toTensorVector()) {
    specs.push_back(viewed_spec(self, geometry, dim_map));
  }
  call.argument(0) = local_of(self);
  auto views = call.run()[0].toTensorVector();
  for (size_t i = 0; i < views.size(); ++i)
    views[i] = make_dtensor_view(self, views[i], std::move(specs[i]));
  call.finish(std::move(views));
}

int64_t wrapped(const c10::IValue& dim, int64_t ndim) {
  return c10::maybe_wrap_dim(dim.toInt(), ndim);
}

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
  finish_view(call, [order](int64_t d) {
    return std::find(order.begin(), order.end(), d) - order.begin();
  });
}

void unsqueeze_rule(OperatorCall& call) {
  const int64_t at =
      c10::maybe_wrap_dim(call.argument(1).toInt(), call.argument(0).toTensor().dim() + 1);
  finish_view(call, [at](int64_t d) { return d >= at ? d + 1 : d; });
}

// select: the dimension goes away.
void select_rule(OperatorCall& call) {
  const int64_t at = wrapped(call.argument(1), call.argument(0).toTensor().dim());
  finish_view(call, [at](int64_t d) { return d == at ? -1 : d > at ? d - 1 : d; });
}

// Which elements of dimension `dim` a view of `self` has that leaves its other
// dimensions, and the distance of elements, as they are.
DimRange range_of(const at::Tensor& self, const at::Tensor& geometry, int64_t dim) {
  const int64_t stride = std::max<int64_t>(self.stride(dim), 1);
  return {.dim = dim, .start = geometry.storage_offset() / stride, .length = geometry.size(dim)};
}

// Views of whole blocks of a cut dimension; nothing where some are not.
std::optional<std::vector<at::Tensor>> views_of_blocks(const at::Tensor& self,
                                                       const std::vector<at::Tensor>& geometries,
                                                       int64_t dim) {
  const DTensorSpec& spec = spec_of(self);
  if (!spec.is_cut(dim)) return std::nullopt;
  std::vector<at::Tensor> views;
  for (const at::Tensor& geometry : geometries) {
    const DimRange range = range_of(self, geometry, dim);
    auto placements = placements_of_range(spec, range);
    if (!placements.has_value() || geometry.strides() != self.strides()) return std::nullopt;
    const DimRange own = local_range(spec, range);
    const at::Tensor local = local_of(self).narrow(dim, own.start, own.length);
    views.push_back(
        make_dtensor_view(self, local,
                          DTensorSpec(spec.mesh(), std::move(*placements), geometry.sizes().vec(),
                                      geometry.strides().vec())));
  }
  return views;
}

// slice: the dimension stays but is another.
void slice_rule(OperatorCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  const int64_t at = wrapped(call.argument(1), self.dim());
  const at::Tensor geometry = viewed_geometry(call, self, call.arguments()).toTensor();
  if (geometry.sizes() == self.sizes()) return call.finish(aliased(self));
  if (const auto views = views_of_blocks(self, {geometry}, at)) return call.finish(views->front());
  finish_view(call, [at](int64_t d) { return d == at ? -1 : d; });
}

// split: as slice, many times.
void split_rule(OperatorCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  const int64_t at = wrapped(*call.find_argument("dim"), self.dim());
  const auto geometries = viewed_geometry(call, self, call.arguments()).toTensorVector();
  if (auto views = views_of_blocks(self, geometries, at)) return call.finish(std::move(*views));
  finish_views(call, [at](int64_t d) { return d == at ? -1 : d; });
}

// unbind: as select, many times.
void unbind_rule(OperatorCall& call) {
  const int64_t at = wrapped(call.argument(1), call.argument(0).toTensor().dim());
  finish_views(call, [at](int64_t d) { return d == at ? -1 : d > at ? d - 1 : d; });
}

// diagonal: two dimensions go away and their diagonal comes last.
void diagonal_rule(OperatorCall& call) {
  const int64_t ndim = call.argument(0).toTensor().dim();
  const int64_t a = wrapped(*call.find_argument("dim1"), ndim);
  const int64_t b = wrapped(*call.find_argument("dim2"), ndim);
  finish_view(call, [a, b](int64_t d) { return d == a || d == b ? -1 : d - (d > a) - (d > b); });
}

// unfold: windows over one dimension, whose elements come last.
void unfold_rule(OperatorCall& call) {
  const int64_t at = wrapped(call.argument(1), call.argument(0).toTensor().dim());
  finish_view(call, [at](int64_t d) { return d == at ? -1 : d; });
}

// Another dtype over the same bytes; the last dimension changes unless the elements are
// of the same size.
void view_dtype_rule(OperatorCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  const bool same = static_cast<int64_t>(c10::elementSize(call.argument(1).toScalarType())) ==
                    self.element_size();
  const int64_t last = self.dim() - 1;
  finish_view(call, [same, last](int64_t d) { return same || d != last ? d : -1; });
}

// view_as_real and view_as_complex (a last dimension of 2 comes and goes), _conj,
// _neg_view.
void every_dim_stays_rule(OperatorCall& call) {
  const int64_t last = call.argument(0).toTensor().dim() - 1;
  const bool drops_last = call.handle().operator_name().name == "aten::view_as_complex";
  finish_view(call, [drops_last, last](int64_t d) { return drops_last && d == last ? -1 : d; });
}

// Which dimensions of size 1 a call of squeeze takes away. Not those of which only a part
// is of size 1.
std::vector<int64_t> squeezed_dims(const OperatorCall& call, const at::Tensor& self) {
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < self.dim(); ++d) {
    if (self.size(d) == 1) dims.push_back(d);
  }
  if (call.argument_count() == 1) return dims;
  auto given = call.argument(1).isInt() ? std::vector<int64_t>{call.argument(1).toInt()}
                                        : call.argument(1).toIntVector();
  for (int64_t& d : given) d = c10::maybe_wrap_dim(d, self.dim());
  std::erase_if(dims, [&](int64_t d) { return std::count(given.begin(), given.end(), d) == 0; });
  return dims;
}

void squeeze_rule(OperatorCall& call) {
  const auto dims = squeezed_dims(call, call.argument(0).toTensor());
  const DimMap dim_map = [&dims](int64_t d) {
    const auto at = std::lower_bound(dims.begin(), dims.end(), d);
    return at != dims.end() && *at == d ? -1 : d - (at - dims.begin());
  };
  const at::Tensor self = viewable(call, call.argument(0).toTensor(), dim_map);
  auto spec = viewed_spec(self, viewed_geometry(call, self, call.arguments()).toTensor(), dim_map);
  call.finish(make_dtensor_view(self, local_of(self).squeeze(dims), std::move(spec)));
}

// expand: every dimension but those of size 1 stays.
void expand_rule(OperatorCall& call) {
  auto size = call.argument(1).toIntVector();
  const at::Tensor given = call.argument(0).toTensor();
  const int64_t shift = static_cast<int64_t>(size.size()) - given.dim();
  const DimMap dim_map = [&](int64_t d) {
    const int64_t wanted = size[static_cast<size_t>(d + shift)];
    return wanted != -1 && wanted != given.size(d) ? -1 : d + shift;
  };
  const at::Tensor self = viewable(call, given, dim_map);
  auto spec = viewed_spec(self, viewed_geometry(call, self, call.arguments()).toTensor(), dim_map);
  for (int64_t d = 0; d < self.dim(); ++d) {
    if (const int64_t to = dim_map(d); to >= 0) size[static_cast<size_t>(to)] = -1;
  }
  call.argument(0) = local_of(self);
  call.argument(1) = size;
  auto results = call.run();
  call.finish(make_dtensor_view(self, results[0].toTensor(), std::move(spec)));
}

}  // namespace

void add_view_rules(RuleTable& table) {
  for (const char* name : {"detach", "alias"}) table[name] = alias_rule;
  for (const char* name : {"t", "transpose.int"}) table[name] = transpose_rule;
  for (const char* name : {"squeeze.", "squeeze.dim", "squeeze.dims"}) table[name] = squeeze_rule;
  table["permute"] = permute_rule;
  table["unsqueeze"] = unsqueeze_rule;
  table["select.int"] = select_rule;
  table["slice.Tensor"] = slice_rule;
  table["expand"] = expand_rule;
  for (const char* name : {"split.Tensor", "split_with_sizes."}) table[name] = split_rule;
  table["unbind.int"] = unbind_rule;
  table["diagonal."] = diagonal_rule;
  table["unfold."] = unfold_rule;
  table["view.dtype"] = view_dtype_rule;
  for (const char* name : {"view_as_real", "view_as_complex", "_conj", "_neg_view"})
    table[name] = every_dim_stays_rule;
}

}  // namespace fsdp::internal
