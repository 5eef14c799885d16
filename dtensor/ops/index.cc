// Indices are the same on all ranks: cuts along dimensions that they do not index stay.
// So do those along dimensions of which a view took all.
#include "dtensor/ops/index.h"

#include "dtensor/ops/op_table.h"
#include "dtensor/strategy/block_ranges.h"
#include "dtensor/strategy/broadcast.h"
#include "dtensor/strategy/index_ways.h"
#include "dtensor/strategy/view_ways.h"

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

using Op = Partial::Op;

std::vector<Way> ways_of_terms(size_t operands, std::vector<Op> reductions) {
  std::vector<Way> ways;
  for (const Op op : reductions) {
    Way way = replicated_way(1, operands);
    way.results[0] = way.operands[0] = Partial{op};
    ways.push_back(std::move(way));
  }
  return ways;
}

std::vector<Way> ways_of_all_terms(size_t operands) {
  return ways_of_terms(operands, {Op::kSum, Op::kAvg, Op::kMin, Op::kMax, Op::kProduct});
}

// Operand 0 cut along `from`, the others whole.
Way self_cut(size_t operands, int64_t from, int64_t to) {
  Way way = replicated_way(1, operands);
  way.operands[0] = Shard{from};
  way.results[0] = Shard{to};
  return way;
}

// index_select(self, dim, index)
std::vector<Way> index_select_ways(const CallGeometry& call) {
  const int64_t ndim = call.operands[0].ndim();
  const int64_t dim = wrapped_dim(call.number(1), ndim);
  auto ways = ways_of_all_terms(2);
  for (int64_t d = 0; d < ndim; ++d) {
    if (d != dim) ways.push_back(self_cut(2, d, d));
  }
  if (ndim > 0 && call.operands[1].ndim() > 0)
    ways.push_back({.results = {Shard{dim}}, .operands = {Replicate{}, Shard{0}}});
  return ways;
}

std::vector<ResultGeometry> index_select_results(const CallGeometry& call) {
  auto shape = call.operands[0].shape;
  const int64_t dim = wrapped_dim(call.number(1), call.operands[0].ndim());
  const auto& index = call.operands[1].shape;
  if (!shape.empty()) shape[static_cast<size_t>(dim)] = index.empty() ? 1 : index[0];
  return {contiguous(std::move(shape))};
}

// index(self, indices): dimension i is indexed by indices[i], where that is there.
struct Indexed {
  // `end`: the operand after the indices.
  Indexed(const CallGeometry& of, size_t end) : call(of) {
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
      return call.operands[static_cast<size_t>(d) + 1].element_size == 1;
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

  const CallGeometry& call;
  std::vector<int64_t> dims = {};
  int64_t index_ndim = 0;  // of all indices broadcast together
};

std::vector<Way> index_ways(const CallGeometry& call) {
  const Indexed indexed(call, call.operands.size());
  if (indexed.dims.empty() || indexed.has_masks()) return {};
  const size_t operands = call.operands.size();
  auto ways = ways_of_all_terms(operands);
  for (int64_t d = 0; d < call.operands[0].ndim(); ++d) {
    if (!indexed.indexes(d)) ways.push_back(self_cut(operands, d, indexed.dim_after(d)));
  }
  if (indexed.dims.size() > 1) return ways;
  const auto only = static_cast<size_t>(indexed.dims[0]) + 1;
  for (int64_t d = 0; d < call.operands[only].ndim(); ++d) {
    Way way = replicated_way(1, operands);
    way.operands[only] = Shard{d};
    way.results[0] = Shard{indexed.first_index_dim() + d};
    ways.push_back(std::move(way));
  }
  return ways;
}

// index_put(self, indices, values, accumulate): values are broadcast to what
// index(self, indices) would give.
std::vector<Way> index_put_ways(const CallGeometry& call) {
  const size_t last = call.operands.size() - 1;
  const Indexed indexed(call, last);
  if (indexed.dims.empty() || indexed.has_masks()) return {};
  const auto ndim =
      call.operands[0].ndim() - static_cast<int64_t>(indexed.dims.size()) + indexed.index_ndim;
  std::vector<Way> ways;
  for (int64_t d = 0; d < call.operands[0].ndim(); ++d) {
    if (indexed.indexes(d)) continue;
    Way way = self_cut(last + 1, d, d);
    way.operands[last] =
        broadcast_along(call.operands[last], ndim, indexed.dim_after(d), call.operands[0].size(d));
    ways.push_back(std::move(way));
  }
  return ways;
}

// index_fill(self, dim, index, value), index_copy and index_add(self, dim, index,
// source).
std::vector<Way> index_write_ways(const CallGeometry& call) {
  const Operand& self = call.operands[0];
  std::vector<Way> ways;
  for (int64_t d = 0; d < self.ndim(); ++d) {
    if (d == wrapped_dim(call.number(1), self.ndim())) continue;
    Way way = self_cut(call.operands.size(), d, d);
    if (call.operands.size() > 2 && call.operands[2].ndim() == self.ndim())
      way.operands[2] = Shard{d};
    ways.push_back(std::move(way));
  }
  return ways;
}

std::vector<Way> index_add_ways(const CallGeometry& call) {
  auto ways = index_write_ways(call);
  for (const Op op : {Op::kSum, Op::kAvg})
    ways.push_back({{Partial{op}}, {Partial{op}, Replicate{}, Partial{op}}});
  return ways;
}

// gather(self, dim, index): along a cut of the indices too, where self is whole.
std::vector<Way> gather_ways(const CallGeometry& call) {
  const int64_t ndim = call.operands[0].ndim();
  const int64_t dim = wrapped_dim(call.number(1), ndim);
  auto ways = equal_dims_ways(call, dim);
  for (Way& way : ways_of_all_terms(2)) ways.push_back(std::move(way));
  if (ndim > 0) ways.push_back({.results = {Shard{dim}}, .operands = {Replicate{}, Shard{dim}}});
  return ways;
}

std::vector<ResultGeometry> gather_results(const CallGeometry& call) {
  return {contiguous(call.operands[1].shape)};
}

// The gradient of a view: zeros of argument 1's shape with operand 0 at its place. The
// part's shape is that of the result.
std::vector<PartArgument> part_of_whole(const CallGeometry&, const PlacedCall& placed) {
  return {{1, placed.results[0].local_shape(placed.coordinate)}};
}

std::vector<ResultGeometry> whole_results(const CallGeometry& call) {
  return {contiguous(call.numbers(1))};
}

OperatorWays gradient_of_view(const WaysOf& ways) {
  return {.ways = ways, .results = whole_results, .part_arguments = part_of_whole};
}

// select_backward(grad, sizes, dim, index)
std::vector<Way> select_backward_ways(const CallGeometry& call) {
  const auto ndim = static_cast<int64_t>(call.numbers(1).size());
  const int64_t dim = wrapped_dim(call.number(2), ndim);
  auto ways = ways_of_terms(1, {Op::kSum, Op::kAvg});
  for (int64_t d = 0; d + 1 < ndim; ++d) ways.push_back(self_cut(1, d, d < dim ? d : d + 1));
  return ways;
}

// diagonal_backward(grad, sizes, offset, dim1, dim2): the diagonal is the last dimension.
std::vector<Way> diagonal_backward_ways(const CallGeometry& call) {
  const auto ndim = static_cast<int64_t>(call.numbers(1).size());
  const int64_t a = wrapped_dim(call.number(3), ndim), b = wrapped_dim(call.number(4), ndim);
  auto ways = ways_of_terms(1, {Op::kSum, Op::kAvg});
  int64_t from = 0;
  for (int64_t d = 0; d < ndim; ++d) {
    if (d != a && d != b) ways.push_back(self_cut(1, from++, d));
  }
  return ways;
}

// unfold_backward(grad, sizes, dim, size, step): the windows' elements are last.
std::vector<Way> unfold_backward_ways(const CallGeometry& call) {
  const auto ndim = static_cast<int64_t>(call.numbers(1).size());
  auto ways = ways_of_terms(1, {Op::kSum, Op::kAvg});
  for (int64_t d = 0; d < ndim; ++d) {
    if (d != wrapped_dim(call.number(2), ndim)) ways.push_back(self_cut(1, d, d));
  }
  return ways;
}

// slice_backward(grad, sizes, dim, start, end, step), as a slice of what it makes.
CallGeometry sliced(const CallGeometry& call) {
  const auto none = PlainArgument{};
  return {.operands = {{.shape = call.numbers(1), .stride = {}, .element_size = 1}},
          .plain = {none, call.plain[2], call.plain[3], call.plain[4], call.plain[5]}};
}

std::vector<Way> slice_backward_ways(const CallGeometry& call) {
  const auto ndim = static_cast<int64_t>(call.numbers(1).size());
  const int64_t dim = wrapped_dim(call.number(2), ndim);
  auto ways = ways_of_terms(1, {Op::kSum, Op::kAvg});
  for (int64_t d = 0; d < ndim; ++d) {
    if (d != dim) ways.push_back(self_cut(1, d, d));
  }
  const Placement& arriving = call.arriving[0];
  const auto range = sliced_range(sliced(call));
  if (!range.has_value() || !arriving.is_shard(dim)) return ways;
  const int64_t size = call.numbers(1)[static_cast<size_t>(dim)];
  if (const auto cut = cut_around_range(arriving.shard(), size, *range, call.ranks))
    ways.push_back({.results = {*cut}, .operands = {arriving}});
  return ways;
}

std::vector<PartArgument> slice_backward_part(const CallGeometry& call, const PlacedCall& placed) {
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
            {.ways = {.ways = index_select_ways, .results = index_select_results}});
  table.add("index.Tensor", {.ways = {.ways = index_ways}});
  for (const char* name : {"index_put.", "index_put_."})
    table.add(name, {.ways = {.ways = index_put_ways, .results = results_as_self}});
  for (const char* name :
       {"index_fill.int_Scalar", "index_fill_.int_Scalar", "index_fill.int_Tensor",
        "index_fill_.int_Tensor", "index_copy.", "index_copy_."}) {
    table.add(name, {.ways = {.ways = index_write_ways, .results = results_as_self}});
  }
  for (const char* name : {"index_add.", "index_add_."})
    table.add(name, {.ways = {.ways = index_add_ways, .results = results_as_self}});
  table.add("gather.", {.ways = {.ways = gather_ways, .results = gather_results}});
  table.add("select_backward.", {.ways = gradient_of_view(select_backward_ways)});
  table.add("diagonal_backward.", {.ways = gradient_of_view(diagonal_backward_ways)});
  table.add("unfold_backward.", {.ways = gradient_of_view(unfold_backward_ways)});
  table.add("slice_backward.", {.ways = {.ways = slice_backward_ways,
                                         .results = whole_results,
                                         .part_arguments = slice_backward_part}});
}

}  // namespace fsdp::internal
