// Along a dimension that is cut each rank has candidates, which are gathered, a few
// numbers per row, and the choice is among them.
#include "dtensor/dispatch/cut_indices.h"
#include "dtensor/ops/op_table.h"
#include "dtensor/ops/row_statistics.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/strategy/whole_dim_strategy.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

// Candidates of each row, in a last dimension, and where in the whole row they stand.
struct Candidates {
  at::Tensor values, indices;
};

// The mesh dimension that cuts `dim`, if it is one.
std::optional<size_t> only_cut(const DTensorSpec& spec, int64_t dim) {
  std::optional<size_t> found;
  for (size_t m = 0; m < spec.placements().size(); ++m) {
    if (!cuts_one_of(spec, m, {dim})) continue;
    if (found.has_value()) return std::nullopt;
    found = m;
  }
  return found;
}

// How many elements of `dim` the rank at index `index` of mesh dimension `m` has.
int64_t length_of_part(const DTensorSpec& spec, int64_t dim, size_t m, int64_t index) {
  auto coordinate = spec.mesh().coordinate();
  coordinate[m] = index;
  return spec.layout().local_shape(coordinate)[static_cast<size_t>(dim)];
}

at::Tensor as_bytes(const at::Tensor& rows) {
  return rows.clone(at::MemoryFormat::Contiguous).view(at::kByte);
}

// Numbers of `type` in the last dimension, from byte `start` on: in memory of their own,
// as they need not be aligned there.
at::Tensor from_bytes(const at::Tensor& bytes, int64_t start, int64_t count, at::ScalarType type) {
  const auto size = static_cast<int64_t>(c10::elementSize(type));
  return bytes.narrow(-1, start, count * size).clone(at::MemoryFormat::Contiguous).view(type);
}

at::Tensor padded_to(const at::Tensor& rows, int64_t count) {
  return at::constant_pad_nd(rows, {0, count - rows.size(-1)}, 0);
}

// Those of all ranks, of which each has at most `limit`, and no more than elements.
// Collective over mesh dimension `m`: one all-gather.
Candidates candidates_of_all(const Candidates& own, int64_t limit, const DTensorSpec& spec,
                             int64_t dim, size_t m) {
  const int64_t ranks = spec.mesh().shape()[m];
  std::vector<int64_t> counts;
  for (int64_t r = 0; r < ranks; ++r)
    counts.push_back(std::min(limit, length_of_part(spec, dim, m, r)));
  const int64_t most = *std::max_element(counts.begin(), counts.end());
  const at::Tensor packed =
      at::cat({as_bytes(padded_to(own.values, most)), as_bytes(padded_to(own.indices, most))}, -1);
  const at::Tensor all = gathered_across(packed, spec.mesh(), m);
  const auto type = own.values.scalar_type();
  const int64_t bytes = most * own.values.element_size();
  std::vector<at::Tensor> values, indices;
  for (int64_t r = 0; r < ranks; ++r) {
    const int64_t count = counts[static_cast<size_t>(r)];
    values.push_back(from_bytes(all[r], 0, most, type).narrow(-1, 0, count));
    indices.push_back(from_bytes(all[r], bytes, most, at::kLong).narrow(-1, 0, count));
  }
  return {at::cat(values, -1), at::cat(indices, -1)};
}

// The first place of the extremum, as on one device; a NaN is more extreme than numbers.
Candidates extremum(const Candidates& all, bool is_greatest) {
  const at::Tensor best =
      std::get<0>(is_greatest ? all.values.max(-1, /*keepdim=*/true) : all.values.min(-1, true));
  const at::Tensor is_best = all.values.eq(best).logical_or(all.values.ne(all.values));
  const at::Tensor indices =
      all.indices.masked_fill(is_best.logical_not(), std::numeric_limits<int64_t>::max());
  return {best, indices.amin(-1, /*keepdim=*/true)};
}

Candidates k_most(const Candidates& all, int64_t k, bool largest, bool sorted) {
  const auto [values, places] = all.values.topk(k, -1, largest, sorted);
  return {values, all.indices.gather(-1, places)};
}

// This rank's part with `dim` last.
at::Tensor rows_of(const OperatorCall& call, int64_t dim) {
  return call.argument(0).toTensor().movedim(dim, -1);
}

// Candidates of a part, at places in it: places in the whole.
Candidates in_whole(const Candidates& own, const DTensorSpec& spec, int64_t dim) {
  return {own.values, elements_of_part(spec, dim).index({own.indices})};
}

Candidates own_extremum(const at::Tensor& rows, bool is_greatest) {
  if (rows.size(-1) == 0) return {rows, rows.to(at::kLong)};
  const auto [values, places] = is_greatest ? rows.max(-1, /*keepdim=*/true) : rows.min(-1, true);
  return {values, places};
}

// Where several mesh dimensions cut `dim`, the whole of it is worked along.
void gather_along(OperatorCall& call, const DTensorSpec& spec, int64_t dim) {
  auto placements = spec.placements();
  for (Placement& placement : placements) {
    if (placement.is_shard(dim)) placement = Replicate{};
  }
  call.argument(0) = redistribute_local(call.argument(0).toTensor(), spec, placements);
}

std::vector<c10::IValue> run_gathered(OperatorCall& call, const DTensorSpec& spec, int64_t dim) {
  if (spec.is_cut(dim)) gather_along(call, spec, dim);
  return call.run();
}

// argmax, max(dim) and their like: (self, dim, keepdim)
template <bool is_greatest, bool with_values>
std::vector<c10::IValue> extremum_of_part(OperatorCall& call, const PlacedOnMesh& placed) {
  const DTensorSpec spec = placed.operand(0);
  const auto ndim = static_cast<int64_t>(spec.shape().size());
  if (call.argument(1).isNone() || ndim == 0) return call.run();
  const int64_t dim = wrapped_dim(call.argument(1).toInt(), ndim);
  const auto m = only_cut(spec, dim);
  if (!m.has_value()) return run_gathered(call, spec, dim);
  const auto own = in_whole(own_extremum(rows_of(call, dim), is_greatest), spec, dim);
  const auto best = extremum(candidates_of_all(own, 1, spec, dim, *m), is_greatest);
  const bool keepdim = call.argument(2).toBool();
  const auto placed_back = [&](const at::Tensor& rows) {
    return keepdim ? rows.movedim(-1, dim).contiguous() : rows.squeeze(-1);
  };
  if (!with_values) return {placed_back(best.indices)};
  return {placed_back(best.values), placed_back(best.indices)};
}

// topk(self, k, dim, largest, sorted)
std::vector<c10::IValue> topk_of_part(OperatorCall& call, const PlacedOnMesh& placed) {
  const DTensorSpec spec = placed.operand(0);
  const auto ndim = static_cast<int64_t>(spec.shape().size());
  if (ndim == 0) return call.run();
  const int64_t k = call.argument(1).toInt(), dim = wrapped_dim(call.argument(2).toInt(), ndim);
  const bool largest = call.argument(3).toBool(), sorted = call.argument(4).toBool();
  const auto m = only_cut(spec, dim);
  if (!m.has_value()) return run_gathered(call, spec, dim);
  const at::Tensor rows = rows_of(call, dim);
  const auto [values, places] = rows.topk(std::min(k, rows.size(-1)), -1, largest, sorted);
  const auto own = in_whole({values, places}, spec, dim);
  const auto best = k_most(candidates_of_all(own, k, spec, dim, *m), k, largest, sorted);
  return {best.values.movedim(-1, dim).contiguous(), best.indices.movedim(-1, dim).contiguous()};
}

// topk(self, k, dim, ...): the dimension becomes k elements long.
std::vector<ResultGeometry> topk_results(const OpSchema& call) {
  auto shape = call.operands[0].shape;
  if (!shape.empty()) shape[static_cast<size_t>(given_dims(call, 2)[0])] = call.number(1);
  return {contiguous(shape), contiguous(shape)};
}

// A cut along the dimension that argument `place` names leaves whole results.
template <size_t place>
std::vector<PlacementStrategy> cut_dim_strategy(const OpSchema& call, size_t results) {
  const auto* const dim = std::get_if<int64_t>(&call.plain[place]);
  if (dim == nullptr || call.operands[0].ndim() == 0) return {};
  return {{.results = std::vector<Placement>(results, Replicate{}),
           .operands = {Shard{wrapped_dim(*dim, call.operands[0].ndim())}},
           .asks_other_ranks = true}};
}

// argmax(self, dim, keepdim) and its like.
template <size_t results>
OpStrategy extremum_strategy() {
  return with_more_strategies(along(reduced<1>, results), [](const OpSchema& call) {
    return cut_dim_strategy<1>(call, results);
  });
}

std::vector<PlacementStrategy> topk_strategy(const OpSchema& call) {
  auto strategies = along_strategy(call, kept<2>(call), 2);
  for (PlacementStrategy& strategy : cut_dim_strategy<2>(call, 2))
    strategies.push_back(std::move(strategy));
  return strategies;
}

}  // namespace

void add_extrema(OpTable& table) {
  table.add("argmax.",
            {.strategy = extremum_strategy<1>(), .local_kernel = extremum_of_part<true, false>});
  table.add("argmin.",
            {.strategy = extremum_strategy<1>(), .local_kernel = extremum_of_part<false, false>});
  table.add("max.dim",
            {.strategy = extremum_strategy<2>(), .local_kernel = extremum_of_part<true, true>});
  table.add("min.dim",
            {.strategy = extremum_strategy<2>(), .local_kernel = extremum_of_part<false, true>});
  table.add("topk.", {.strategy = {.strategies = topk_strategy, .results = topk_results},
                      .local_kernel = topk_of_part});
}

}  // namespace fsdp::internal
