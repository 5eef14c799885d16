// A cut follows its dimension, and so do whole blocks of one that is cut in blocks. split
// and squeeze take of a part what it has of what they take of the whole. detach and
// alias, and as_strided where it leaves the layout as it is, are no more than another
// tensor object. view(dtype) has others where it changes the size of elements. In place,
// as matmul squeezes its result and RNNs transpose theirs, the tensor becomes what the
// operator that makes a view gives.
#include "dtensor/dispatch/gathered_view.h"
#include "dtensor/ops/op_table.h"
#include "dtensor/strategy/view_cuts.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/WrapDimMinimal.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

// Where each dimension of operand 0 goes; kGone: not all of it is in the result.
using DimMap = std::vector<int64_t>;
constexpr int64_t kGone = -1;

const Operand& self_of(const OpSchema& call) { return call.operands[0]; }

DimMap identity(int64_t ndim) {
  DimMap map(static_cast<size_t>(ndim));
  std::iota(map.begin(), map.end(), 0);
  return map;
}

int64_t dim_at(const OpSchema& call, size_t place) {
  return wrapped_dim(call.number(place), self_of(call).ndim());
}

// Of a dimension that goes away, and all behind it one place to the front.
DimMap without(int64_t ndim, int64_t dim) {
  DimMap map = identity(ndim);
  for (int64_t& to : map) to = to == dim ? kGone : to - (to > dim ? 1 : 0);
  return map;
}

DimMap gone_in_place(int64_t ndim, int64_t dim) {
  DimMap map = identity(ndim);
  if (ndim > 0) map[static_cast<size_t>(dim)] = kGone;
  return map;
}

DimMap swapped(int64_t ndim, int64_t a, int64_t b) {
  DimMap map = identity(ndim);
  if (ndim > 0) std::swap(map[static_cast<size_t>(a)], map[static_cast<size_t>(b)]);
  return map;
}

DimMap t_map(const OpSchema& call) {
  const int64_t ndim = self_of(call).ndim();
  return swapped(ndim, 0, ndim - 1);
}

DimMap transpose_map(const OpSchema& call) {
  return swapped(self_of(call).ndim(), dim_at(call, 1), dim_at(call, 2));
}

DimMap permute_map(const OpSchema& call) {
  const auto& order = call.numbers(1);
  DimMap map(order.size());
  for (size_t to = 0; to < order.size(); ++to) {
    const int64_t from = wrapped_dim(order[to], self_of(call).ndim());
    map[static_cast<size_t>(from)] = static_cast<int64_t>(to);
  }
  return map;
}

DimMap unsqueeze_map(const OpSchema& call) {
  const int64_t ndim = self_of(call).ndim();
  const int64_t at = wrapped_dim(call.number(1), ndim + 1);
  DimMap map = identity(ndim);
  for (int64_t& to : map) to += to >= at ? 1 : 0;
  return map;
}

// Which dimensions of size 1 a call of squeeze takes away: not those of which only a part
// is of size 1.
DimMap squeeze_map(const OpSchema& call) {
  const Operand& self = self_of(call);
  std::vector<bool> goes(self.shape.size(), call.plain.size() == 1);
  const auto ask_for = [&](int64_t dim) {
    if (self.ndim() > 0) goes[static_cast<size_t>(wrapped_dim(dim, self.ndim()))] = true;
  };
  if (call.plain.size() > 1) {
    if (const auto* const dim = std::get_if<int64_t>(&call.plain[1])) ask_for(*dim);
    if (const auto* const dims = std::get_if<std::vector<int64_t>>(&call.plain[1]))
      for (const int64_t dim : *dims) ask_for(dim);
  }
  DimMap map;
  int64_t next = 0;
  for (size_t d = 0; d < self.shape.size(); ++d)
    map.push_back(goes[d] && self.shape[d] == 1 ? kGone : next++);
  return map;
}

// select and unbind.
DimMap select_map(const OpSchema& call) { return without(self_of(call).ndim(), dim_at(call, 1)); }

// diagonal(self, offset, dim1, dim2): two dimensions go away and their diagonal comes
// last.
DimMap diagonal_map(const OpSchema& call) {
  const int64_t a = dim_at(call, 2), b = dim_at(call, 3);
  DimMap map = identity(self_of(call).ndim());
  for (int64_t& to : map) to = to == a || to == b ? kGone : to - (to > a) - (to > b);
  return map;
}

// unfold: windows over one dimension, whose elements come last.
DimMap unfold_map(const OpSchema& call) {
  return gone_in_place(self_of(call).ndim(), dim_at(call, 1));
}

// expand: every dimension but those of size 1 stays.
DimMap expand_map(const OpSchema& call) {
  const Operand& self = self_of(call);
  const auto& size = call.numbers(1);
  const auto shift = static_cast<int64_t>(size.size()) - self.ndim();
  DimMap map = identity(self.ndim());
  for (int64_t& to : map) {
    const int64_t wanted = size[static_cast<size_t>(to + shift)];
    to = wanted != -1 && wanted != self.size(to) ? kGone : to + shift;
  }
  return map;
}

// The sizes of dimensions that stay are those of the part.
std::vector<PartArgument> expand_part(const OpSchema& call, const PlacedCall&) {
  auto size = call.numbers(1);
  for (const int64_t to : expand_map(call)) {
    if (to != kGone) size[static_cast<size_t>(to)] = -1;
  }
  return {{1, std::move(size)}};
}

// view_as_complex: a last dimension of 2 goes.
DimMap as_complex_map(const OpSchema& call) {
  const int64_t ndim = self_of(call).ndim();
  return gone_in_place(ndim, ndim - 1);
}
DimMap every_dim_map(const OpSchema& call) { return identity(self_of(call).ndim()); }

using MapOf = DimMap (*)(const OpSchema&);

// Terms are what they were, or, where elements change with them, only those of sums.
enum class Terms { kAll, kSums, kNone };

std::vector<Partial::Op> reductions_that_stay(Terms terms) {
  using Op = Partial::Op;
  if (terms == Terms::kNone) return {};
  if (terms == Terms::kSums) return {Op::kSum, Op::kAvg};
  return {Op::kSum, Op::kAvg, Op::kMin, Op::kMax, Op::kProduct};
}

PlacementStrategy strategy_between(const Placement& from, const Placement& to, size_t results) {
  return {.results = std::vector<Placement>(results, to), .operands = {from}};
}

// One strategy per dimension that stays, and per reduction whose terms stay.
std::vector<PlacementStrategy> mapped_strategy(const DimMap& map, size_t results = 1,
                                               Terms terms = Terms::kAll) {
  std::vector<PlacementStrategy> strategies;
  for (size_t d = 0; d < map.size(); ++d) {
    if (map[d] != kGone)
      strategies.push_back(
          strategy_between(Shard{static_cast<int64_t>(d)}, Shard{map[d]}, results));
  }
  for (const Partial::Op op : reductions_that_stay(terms))
    strategies.push_back(strategy_between(Partial{op}, Partial{op}, results));
  return strategies;
}

OpStrategy mapped(MapOf map_of, Terms terms = Terms::kAll) {
  return {
      .strategies = [=](const OpSchema& call) { return mapped_strategy(map_of(call), 1, terms); }};
}

std::vector<PlacementStrategy> expand_strategy(const OpSchema& call) {
  return mapped_strategy(expand_map(call));
}

// The whole of dimension `dim`, once for every result.
std::vector<PlacementStrategy> unbind_strategy(const OpSchema& call) {
  const auto count = static_cast<size_t>(self_of(call).size(dim_at(call, 1)));
  return mapped_strategy(select_map(call), count);
}

// Ranges of dimension `dim`, one per result, that keep a cut in blocks.
std::optional<PlacementStrategy> strategy_of_ranges(const OpSchema& call, int64_t dim,
                                                    const std::vector<Range>& ranges) {
  const Placement& arriving = call.arriving[0];
  if (!arriving.is_shard(dim)) return std::nullopt;
  PlacementStrategy strategy{.results = {}, .operands = {arriving}};
  for (const Range& range : ranges) {
    const auto cut = cut_of_range(arriving.shard(), self_of(call).size(dim), range, call.ranks);
    if (!cut.has_value()) return std::nullopt;
    strategy.results.push_back(*cut);
  }
  return strategy;
}

std::vector<PlacementStrategy> strategies_of_ranges(const OpSchema& call, int64_t dim,
                                                    const std::vector<Range>& ranges) {
  const int64_t ndim = self_of(call).ndim();
  const bool has_all = std::all_of(ranges.begin(), ranges.end(), [&](const Range& range) {
    return range.length == self_of(call).size(dim);
  });
  auto strategies =
      mapped_strategy(has_all ? identity(ndim) : gone_in_place(ndim, dim), ranges.size());
  if (const auto strategy = has_all ? std::nullopt : strategy_of_ranges(call, dim, ranges))
    strategies.push_back(*strategy);
  return strategies;
}

std::vector<PlacementStrategy> slice_strategy(const OpSchema& call) {
  const int64_t dim = dim_at(call, 1);
  if (const auto range = sliced_range(call)) return strategies_of_ranges(call, dim, {*range});
  return mapped_strategy(gone_in_place(self_of(call).ndim(), dim));
}

std::vector<PartArgument> slice_part(const OpSchema& call, const PlacedCall& placed) {
  const int64_t dim = dim_at(call, 1);
  const auto range = sliced_range(call);
  if (!range.has_value() || !placed.operands[0].is_cut(dim)) return {};
  const Range own = local_range(placed.operands[0], placed.coordinate, dim, *range);
  return {{2, own.start}, {3, own.start + own.length}};
}

// The pieces of split(self, size, dim) and split_with_sizes(self, sizes, dim).
std::vector<Range> split_ranges(const OpSchema& call) {
  const int64_t size = self_of(call).size(dim_at(call, 2));
  std::vector<Range> ranges;
  if (const auto* const sizes = std::get_if<std::vector<int64_t>>(&call.plain[1])) {
    int64_t start = 0;
    for (const int64_t length : *sizes) {
      ranges.push_back({.start = start, .length = length});
      start += length;
    }
    return ranges;
  }
  const int64_t step = std::max<int64_t>(call.number(1), 1);
  for (int64_t start = 0; start < size || ranges.empty(); start += step)
    ranges.push_back({.start = start, .length = std::min(step, size - start)});
  return ranges;
}

std::vector<PlacementStrategy> split_strategy(const OpSchema& call) {
  return strategies_of_ranges(call, dim_at(call, 2), split_ranges(call));
}

// repeat(self, repeats): a dimension that is repeated has its parts in each block.
std::vector<PlacementStrategy> repeat_strategy(const OpSchema& call) {
  const Operand& self = self_of(call);
  const auto& repeats = call.numbers(1);
  const auto shift = static_cast<int64_t>(repeats.size()) - self.ndim();
  auto strategies = mapped_strategy({});
  for (int64_t d = 0; d < self.ndim(); ++d) {
    const int64_t count = repeats[static_cast<size_t>(d + shift)];
    const bool arrives = call.arriving[0].is_shard(d);
    if (count == 0 || (count > 1 && (!arrives || call.arriving[0].is_ragged()))) continue;
    const Shard cut = arrives ? call.arriving[0].shard() : Shard{d};
    Shard repeated = cut;
    repeated.dim = d + shift;
    repeated.outer *= count;
    strategies.push_back({.results = {simplest(repeated, self.size(d) * count, call.ranks)},
                          .operands = {Placement(cut)}});
  }
  return strategies;
}

std::vector<ResultGeometry> repeat_results(const OpSchema& call) {
  const auto& repeats = call.numbers(1);
  auto shape = repeats;
  for (size_t d = 1; d <= self_of(call).shape.size(); ++d)
    shape[shape.size() - d] *= self_of(call).shape[self_of(call).shape.size() - d];
  return {contiguous(std::move(shape))};
}

OpSchema whole_geometry(const OperatorCall& call, const DTensorSpec& self) {
  return {
      .operands = {{.shape = self.shape(), .stride = self.stride(), .dtype = {.element_size = 1}}},
      .plain = ArgumentKinds(call.handle().schema()).plain_of(call)};
}

// Each piece is what this rank has of it: of a piece of which it has nothing too.
std::vector<c10::IValue> split_part(OperatorCall& call, const PlacedOnMesh& placed) {
  const DTensorSpec self = placed.operand(0);
  const at::Tensor local = call.argument(0).toTensor();
  const int64_t dim = c10::maybe_wrap_dim(call.argument(2).toInt(), local.dim());
  if (!self.is_cut(dim)) return call.run();
  std::vector<at::Tensor> pieces;
  for (const Range& range : split_ranges(whole_geometry(call, self))) {
    const Range own = local_range(self.layout(), placed.mesh().coordinate(), dim, range);
    pieces.push_back(local.narrow(dim, own.start, own.length));
  }
  return {std::move(pieces)};
}

// Not those dimensions of which only the part is of size 1.
std::vector<c10::IValue> squeeze_part(OperatorCall& call, const PlacedOnMesh& placed) {
  const DimMap map = squeeze_map(whole_geometry(call, placed.operand(0)));
  std::vector<int64_t> dims;
  for (size_t d = 0; d < map.size(); ++d) {
    if (map[d] == kGone) dims.push_back(static_cast<int64_t>(d));
  }
  return {call.argument(0).toTensor().squeeze(dims)};
}

// The same DTensor in a new tensor object, owner and all.
void hand_out_alias(OperatorCall& call, const StrategyKernel*) {
  const at::Tensor self = call.argument(0).toTensor();
  call.finish(make_dtensor_view(self, local_of(self), spec_of(self)));
}

// view(dtype): another dtype over the same bytes. The last dimension stays where elements
// are of one size.
std::vector<PlacementStrategy> view_dtype_strategy(const OpSchema& call) {
  const int64_t ndim = self_of(call).ndim();
  const bool keeps_last = call.dtype(1)->element_size == self_of(call).dtype.element_size;
  const DimMap map = keeps_last ? identity(ndim) : gone_in_place(ndim, ndim - 1);
  return mapped_strategy(map, 1, Terms::kNone);
}

// as_strided(self, size, stride, storage_offset)
void hand_out_strided(OperatorCall& call, const StrategyKernel* by_strategy) {
  const at::Tensor self = call.argument(0).toTensor();
  const bool same = call.argument(1).toIntVector() == spec_of(self).shape() &&
                    call.argument(2).toIntVector() == spec_of(self).stride() &&
                    (call.argument(3).isNone() || call.argument(3).toInt() == 0);
  if (!same && view_of_member(call, self)) return;
  TORCH_CHECK_NOT_IMPLEMENTED(same, call.description(),
                              ": a DTensor has no memory to stride over. Use .to_local() or "
                              ".full_tensor() (collective).");
  hand_out_alias(call, by_strategy);
}

// In place, by the operator that makes a view. Collective where the view can not keep a
// cut (gathered_view.h).
OpHandler becomes_view(const char* name, const char* overload) {
  const auto view = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  return [view](OperatorCall& call, const StrategyKernel*) {
    const at::Tensor self = call.argument(0).toTensor();
    TORCH_CHECK_NOT_IMPLEMENTED(owner_of(self) == nullptr || is_gathered_view(self),
                                call.description(),
                                " changes the shape of a sharded parameter in place (rank ",
                                spec_of(self).mesh().rank(), ")");
    auto arguments = call.arguments();
    view.callBoxed(arguments);
    become_view(self, arguments[0].toTensor());
    call.finish(self);
  };
}

}  // namespace

void add_view(OpTable& table) {
  table.add("t.", {.strategy = mapped(t_map)});
  table.add("transpose.int", {.strategy = mapped(transpose_map)});
  table.add("permute.", {.strategy = mapped(permute_map)});
  table.add("unsqueeze.", {.strategy = mapped(unsqueeze_map)});
  for (const char* name : {"squeeze.", "squeeze.dim", "squeeze.dims"})
    table.add(name, {.strategy = mapped(squeeze_map), .local_kernel = squeeze_part});
  table.add("select.int", {.strategy = mapped(select_map)});
  table.add("unbind.int", {.strategy = {.strategies = unbind_strategy}});
  table.add("diagonal.", {.strategy = mapped(diagonal_map)});
  table.add("unfold.", {.strategy = mapped(unfold_map)});
  table.add("expand.",
            {.strategy = {.strategies = expand_strategy, .part_arguments = expand_part}});
  table.add("slice.Tensor",
            {.strategy = {.strategies = slice_strategy, .part_arguments = slice_part}});
  for (const char* name : {"split.Tensor", "split_with_sizes."})
    table.add(name, {.strategy = {.strategies = split_strategy}, .local_kernel = split_part});
  for (const char* name : {"view_as_real.", "_conj.", "_neg_view."})
    table.add(name, {.strategy = mapped(every_dim_map, Terms::kSums)});
  table.add("view_as_complex.", {.strategy = mapped(as_complex_map, Terms::kSums)});
  table.add("repeat.", {.strategy = {.strategies = repeat_strategy, .results = repeat_results}});
  for (const char* name : {"detach", "alias"}) table.add(name, {.handler = hand_out_alias});
  table.add("view.dtype", {.strategy = {.strategies = view_dtype_strategy}});
  table.add("as_strided.", {.handler = hand_out_strided});
  table.add("squeeze_.", {.handler = becomes_view("aten::squeeze", "")});
  table.add("squeeze_.dim", {.handler = becomes_view("aten::squeeze", "dim")});
  table.add("squeeze_.dims", {.handler = becomes_view("aten::squeeze", "dims")});
  table.add("unsqueeze_.", {.handler = becomes_view("aten::unsqueeze", "")});
  table.add("t_.", {.handler = becomes_view("aten::t", "")});
  table.add("transpose_.", {.handler = becomes_view("aten::transpose", "int")});
}

}  // namespace fsdp::internal
