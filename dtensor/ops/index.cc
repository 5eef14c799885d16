// Indices are the same on all ranks: cuts along dimensions that they do not index stay.
// So do those along dimensions of which a view took all.
//
// In place, scatter may meet plain zeros that autograd's formulas make where they mean a
// DTensor, as the gradients of max(dim), sort and topk do: the zeros become one.
#include "dtensor/dtensor.h"
#include "dtensor/ops/op_table.h"
#include "dtensor/redistribute/differentiable.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/strategy/pointwise_strategy.h"
#include "dtensor/strategy/view_cuts.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <c10/core/WrapDimMinimal.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

using Op = Partial::Op;

std::vector<PlacementStrategy> strategies_of_terms(size_t operands,
                                                   const std::vector<Op>& reductions) {
  std::vector<PlacementStrategy> strategies;
  for (const Op op : reductions) {
    PlacementStrategy strategy = replicated_strategy(1, operands);
    strategy.results[0] = strategy.operands[0] = Partial{op};
    strategies.push_back(std::move(strategy));
  }
  return strategies;
}

std::vector<PlacementStrategy> strategies_of_all_terms(size_t operands) {
  return strategies_of_terms(operands, {Op::kSum, Op::kAvg, Op::kMin, Op::kMax, Op::kProduct});
}

// Terms are added to terms.
void add_sums_of_terms(std::vector<PlacementStrategy>& strategies) {
  for (const Op op : {Op::kSum, Op::kAvg})
    strategies.push_back({{Partial{op}}, {Partial{op}, Replicate{}, Partial{op}}});
}

// All operands cut alike along each dimension but `dim` in which they are equally long.
std::vector<PlacementStrategy> equal_dims_strategy(const OpSchema& call, int64_t dim) {
  std::vector<PlacementStrategy> strategies;
  for (int64_t d = 0; d < call.operands[0].ndim(); ++d) {
    const bool fits =
        std::all_of(call.operands.begin(), call.operands.end(), [&](const Operand& operand) {
          return operand.ndim() == call.operands[0].ndim() &&
                 operand.size(d) == call.operands[0].size(d);
        });
    if (d == dim || !fits) continue;
    strategies.push_back({.results = {Shard{d}},
                          .operands = std::vector<Placement>(call.operands.size(), Shard{d})});
  }
  return strategies;
}

// A result as operand 0.
std::vector<ResultGeometry> results_as_self(const OpSchema& call) {
  return {laid_as(call.operands[0].shape, call.operands[0].stride)};
}

// Operand 0 cut along `from`, the others whole.
PlacementStrategy self_cut(size_t operands, int64_t from, int64_t to) {
  PlacementStrategy strategy = replicated_strategy(1, operands);
  strategy.operands[0] = Shard{from};
  strategy.results[0] = Shard{to};
  return strategy;
}

// index_select(self, dim, index)
std::vector<PlacementStrategy> index_select_strategy(const OpSchema& call) {
  const int64_t ndim = call.operands[0].ndim();
  const int64_t dim = wrapped_dim(call.number(1), ndim);
  auto strategies = strategies_of_all_terms(2);
  for (int64_t d = 0; d < ndim; ++d) {
    if (d != dim) strategies.push_back(self_cut(2, d, d));
  }
  if (ndim > 0 && call.operands[1].ndim() > 0)
    strategies.push_back({.results = {Shard{dim}}, .operands = {Replicate{}, Shard{0}}});
  return strategies;
}

std::vector<ResultGeometry> index_select_results(const OpSchema& call) {
  auto shape = call.operands[0].shape;
  const int64_t dim = wrapped_dim(call.number(1), call.operands[0].ndim());
  const auto& index = call.operands[1].shape;
  if (!shape.empty()) shape[static_cast<size_t>(dim)] = index.empty() ? 1 : index[0];
  return {contiguous(std::move(shape))};
}

// index(self, indices): dimension i is indexed by indices[i], where that is there.
struct Indexed {
  // `end`: the operand after the indices.
  Indexed(const OpSchema& of, size_t end) : call(of) {
    for (size_t i = 1; i < end; ++i) {
      if (!call.operands[i].is_present()) continue;
      dims.push_back(static_cast<int64_t>(i) - 1);
      index_ndim = std::max(index_ndim, call.operands[i].ndim());
    }
  }

  // How many elements a mask selects follows from values. Masks have elements of a byte,
  // indices have not.
  bool has_masks() const {
    return std::any_of(dims.begin(), dims.end(), [this](int64_t d) {
      return call.operands[static_cast<size_t>(d) + 1].dtype.element_size == 1;
    });
  }
  bool indexes(int64_t dim) const { return std::count(dims.begin(), dims.end(), dim) > 0; }
  bool are_adjacent() const {
    return dims.back() - dims.front() + 1 == static_cast<int64_t>(dims.size());
  }
  // The dimensions of the indices stand where the indexed ones stood side by side, else
  // come first.
  int64_t first_index_dim() const { return are_adjacent() ? dims.front() : 0; }
  int64_t dim_after(int64_t dim) const {
    const auto before =
        std::count_if(dims.begin(), dims.end(), [dim](int64_t d) { return d < dim; });
    return dim - before + (are_adjacent() && dim < dims.front() ? 0 : index_ndim);
  }

  const OpSchema& call;
  std::vector<int64_t> dims = {};
  int64_t index_ndim = 0;  // of all indices broadcast together
};

std::vector<PlacementStrategy> index_strategy(const OpSchema& call) {
  const Indexed indexed(call, call.operands.size());
  if (indexed.dims.empty() || indexed.has_masks()) return {};
  const size_t operands = call.operands.size();
  auto strategies = strategies_of_all_terms(operands);
  for (int64_t d = 0; d < call.operands[0].ndim(); ++d) {
    if (!indexed.indexes(d)) strategies.push_back(self_cut(operands, d, indexed.dim_after(d)));
  }
  if (indexed.dims.size() > 1) return strategies;
  const auto only = static_cast<size_t>(indexed.dims[0]) + 1;
  for (int64_t d = 0; d < call.operands[only].ndim(); ++d) {
    PlacementStrategy strategy = replicated_strategy(1, operands);
    strategy.operands[only] = Shard{d};
    strategy.results[0] = Shard{indexed.first_index_dim() + d};
    strategies.push_back(std::move(strategy));
  }
  return strategies;
}

// index_put(self, indices, values, accumulate): values are broadcast to what
// index(self, indices) would give.
std::vector<PlacementStrategy> index_put_strategy(const OpSchema& call) {
  const size_t last = call.operands.size() - 1;
  const Indexed indexed(call, last);
  if (indexed.dims.empty() || indexed.has_masks()) return {};
  const auto ndim =
      call.operands[0].ndim() - static_cast<int64_t>(indexed.dims.size()) + indexed.index_ndim;
  std::vector<PlacementStrategy> strategies;
  for (int64_t d = 0; d < call.operands[0].ndim(); ++d) {
    if (indexed.indexes(d)) continue;
    PlacementStrategy strategy = self_cut(last + 1, d, d);
    strategy.operands[last] =
        broadcast_along(call.operands[last], ndim, indexed.dim_after(d), call.operands[0].size(d));
    strategies.push_back(std::move(strategy));
  }
  return strategies;
}

// index_fill(self, dim, index, value), index_copy and index_add(self, dim, index,
// source).
std::vector<PlacementStrategy> index_write_strategy(const OpSchema& call) {
  const Operand& self = call.operands[0];
  std::vector<PlacementStrategy> strategies;
  for (int64_t d = 0; d < self.ndim(); ++d) {
    if (d == wrapped_dim(call.number(1), self.ndim())) continue;
    PlacementStrategy strategy = self_cut(call.operands.size(), d, d);
    if (call.operands.size() > 2 && call.operands[2].ndim() == self.ndim())
      strategy.operands[2] = Shard{d};
    strategies.push_back(std::move(strategy));
  }
  return strategies;
}

std::vector<PlacementStrategy> index_add_strategy(const OpSchema& call) {
  auto strategies = index_write_strategy(call);
  add_sums_of_terms(strategies);
  return strategies;
}

// gather(self, dim, index): along a cut of the indices too, where self is whole.
std::vector<PlacementStrategy> gather_strategy(const OpSchema& call) {
  const int64_t ndim = call.operands[0].ndim();
  const int64_t dim = wrapped_dim(call.number(1), ndim);
  auto strategies = equal_dims_strategy(call, dim);
  for (PlacementStrategy& strategy : strategies_of_all_terms(2))
    strategies.push_back(std::move(strategy));
  if (ndim > 0)
    strategies.push_back({.results = {Shard{dim}}, .operands = {Replicate{}, Shard{dim}}});
  return strategies;
}

std::vector<ResultGeometry> gather_results(const OpSchema& call) {
  return {contiguous(call.operands[1].shape)};
}

// scatter(self, dim, index, source or number)
std::vector<PlacementStrategy> scatter_strategy(const OpSchema& call) {
  return equal_dims_strategy(call, wrapped_dim(call.number(1), call.operands[0].ndim()));
}

// scatter_add(self, dim, index, source) adds terms to terms.
std::vector<PlacementStrategy> scatter_add_strategy(const OpSchema& call) {
  auto strategies = scatter_strategy(call);
  add_sums_of_terms(strategies);
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

// The gradient of a view: zeros of argument 1's shape with operand 0 at its place. The
// part's shape is that of the result.
std::vector<PartArgument> part_of_whole(const OpSchema&, const PlacedCall& placed) {
  return {{1, placed.results[0].local_shape(placed.coordinate)}};
}

std::vector<ResultGeometry> whole_results(const OpSchema& call) {
  return {contiguous(call.numbers(1))};
}

OpStrategy gradient_of_view(const StrategyFunction& strategies) {
  return {.strategies = strategies, .results = whole_results, .part_arguments = part_of_whole};
}

// select_backward(grad, sizes, dim, index)
std::vector<PlacementStrategy> select_backward_strategy(const OpSchema& call) {
  const auto ndim = static_cast<int64_t>(call.numbers(1).size());
  const int64_t dim = wrapped_dim(call.number(2), ndim);
  auto strategies = strategies_of_terms(1, {Op::kSum, Op::kAvg});
  for (int64_t d = 0; d + 1 < ndim; ++d) strategies.push_back(self_cut(1, d, d < dim ? d : d + 1));
  return strategies;
}

// diagonal_backward(grad, sizes, offset, dim1, dim2): the diagonal is the last dimension.
std::vector<PlacementStrategy> diagonal_backward_strategy(const OpSchema& call) {
  const auto ndim = static_cast<int64_t>(call.numbers(1).size());
  const int64_t a = wrapped_dim(call.number(3), ndim), b = wrapped_dim(call.number(4), ndim);
  auto strategies = strategies_of_terms(1, {Op::kSum, Op::kAvg});
  int64_t from = 0;
  for (int64_t d = 0; d < ndim; ++d) {
    if (d != a && d != b) strategies.push_back(self_cut(1, from++, d));
  }
  return strategies;
}

// unfold_backward(grad, sizes, dim, size, step): the windows' elements are last.
std::vector<PlacementStrategy> unfold_backward_strategy(const OpSchema& call) {
  const auto ndim = static_cast<int64_t>(call.numbers(1).size());
  auto strategies = strategies_of_terms(1, {Op::kSum, Op::kAvg});
  for (int64_t d = 0; d < ndim; ++d) {
    if (d != wrapped_dim(call.number(2), ndim)) strategies.push_back(self_cut(1, d, d));
  }
  return strategies;
}

// slice_backward(grad, sizes, dim, start, end, step), as a slice of what it makes.
OpSchema sliced(const OpSchema& call) {
  const auto none = PlainArgument{};
  return {.operands = {{.shape = call.numbers(1), .stride = {}, .dtype = {.element_size = 1}}},
          .plain = {none, call.plain[2], call.plain[3], call.plain[4], call.plain[5]}};
}

std::vector<PlacementStrategy> slice_backward_strategy(const OpSchema& call) {
  const auto ndim = static_cast<int64_t>(call.numbers(1).size());
  const int64_t dim = wrapped_dim(call.number(2), ndim);
  auto strategies = strategies_of_terms(1, {Op::kSum, Op::kAvg});
  for (int64_t d = 0; d < ndim; ++d) {
    if (d != dim) strategies.push_back(self_cut(1, d, d));
  }
  const Placement& arriving = call.arriving[0];
  const auto range = sliced_range(sliced(call));
  if (!range.has_value() || !arriving.is_shard(dim)) return strategies;
  const int64_t size = call.numbers(1)[static_cast<size_t>(dim)];
  if (const auto cut = cut_around_range(arriving.shard(), size, *range, call.ranks))
    strategies.push_back({.results = {*cut}, .operands = {arriving}});
  return strategies;
}

std::vector<PartArgument> slice_backward_part(const OpSchema& call, const PlacedCall& placed) {
  auto arguments = part_of_whole(call, placed);
  const int64_t dim = wrapped_dim(call.number(2), static_cast<int64_t>(call.numbers(1).size()));
  const auto range = sliced_range(sliced(call));
  if (!range.has_value() || !placed.results[0].is_cut(dim)) return arguments;
  const Range own = local_range(placed.results[0], placed.coordinate, dim, *range);
  arguments.push_back({3, own.start});
  arguments.push_back({4, own.start + own.length});
  return arguments;
}

}  // namespace

void add_index(OpTable& table) {
  table.add("index_select.",
            {.strategy = {.strategies = index_select_strategy, .results = index_select_results}});
  table.add("index.Tensor", {.strategy = {.strategies = index_strategy}});
  for (const char* name : {"index_put.", "index_put_."})
    table.add(name, {.strategy = {.strategies = index_put_strategy, .results = results_as_self}});
  for (const char* name :
       {"index_fill.int_Scalar", "index_fill_.int_Scalar", "index_fill.int_Tensor",
        "index_fill_.int_Tensor", "index_copy.", "index_copy_."}) {
    table.add(name, {.strategy = {.strategies = index_write_strategy, .results = results_as_self}});
  }
  for (const char* name : {"index_add.", "index_add_."})
    table.add(name, {.strategy = {.strategies = index_add_strategy, .results = results_as_self}});
  table.add("gather.", {.strategy = {.strategies = gather_strategy, .results = gather_results}});
  const OpStrategy put{.strategies = scatter_strategy, .results = results_as_self};
  for (const char* name : {"scatter.src", "scatter.value"}) table.add(name, {.strategy = put});
  for (const char* name : {"scatter_.src", "scatter_.value"})
    table.add(name, {.strategy = put, .handler = scatter_in_place});
  const OpStrategy added{.strategies = scatter_add_strategy, .results = results_as_self};
  table.add("scatter_add.", {.strategy = added});
  table.add("scatter_add_.", {.strategy = added, .handler = scatter_in_place});
  table.add("select_backward.", {.strategy = gradient_of_view(select_backward_strategy)});
  table.add("diagonal_backward.", {.strategy = gradient_of_view(diagonal_backward_strategy)});
  table.add("unfold_backward.", {.strategy = gradient_of_view(unfold_backward_strategy)});
  table.add("slice_backward.", {.strategy = {.strategies = slice_backward_strategy,
                                             .results = whole_results,
                                             .part_arguments = slice_backward_part}});
}

}  // namespace fsdp::internal
