// Along a cut dimension each rank reduces its part and the results are terms: nothing is
// sent until somebody needs the value. A mean divides by the size of the whole, and the
// extremum of nothing, of which LibTorch knows none, is the neutral element.
#include "dtensor/ops/op_table.h"
#include "dtensor/strategy/whole_dim_strategy.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sum.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

// A result that is terms of `across` where a reduced dimension is cut, and of those that
// the reduction goes through term by term.
struct ReducedTerms {
  Partial::Op across;
  std::vector<Partial::Op> keeps;
};

std::vector<PlacementStrategy> reduction_strategy(const OpSchema& call, const Along& along,
                                                  const std::vector<ReducedTerms>& results) {
  auto strategies = along_strategy(call, along, results.size());
  for (const int64_t dim : along.dims) {
    PlacementStrategy strategy{.results = {}, .operands = {Shard{dim}}};
    for (const ReducedTerms& result : results) strategy.results.push_back(Partial{result.across});
    strategies.push_back(std::move(strategy));
  }
  for (const Partial::Op op : results[0].keeps)
    strategies.push_back({{Partial{op}}, {Partial{op}}});
  return strategies;
}

OpStrategy reduction(AlongOf along_of, const std::vector<ReducedTerms>& results) {
  return {
      .strategies =
          [=](const OpSchema& call) { return reduction_strategy(call, along_of(call), results); },
      .results =
          [along_of, count = results.size()](const OpSchema& call) {
            return std::vector<ResultGeometry>(count, along_result(call, along_of(call)));
          }};
}

// The dimension or dimensions of argument `place`, all where there are none, go away.
template <size_t place>
Along gone(const OpSchema& call) {
  return {.dims = given_dims(call, place), .then = Along::Then::kGo};
}

// any and all take an empty list at its word.
Along reduced_if_given(const OpSchema& call) {
  const auto* const dims = std::get_if<std::vector<int64_t>>(&call.plain[1]);
  Along along = reduced<1>(call);
  if (dims != nullptr && dims->empty()) along.dims.clear();
  return along;
}

// None: all.
std::vector<int64_t> dims_at(const OperatorCall& call, std::optional<size_t> place, int64_t ndim) {
  return given_dims(place ? plain_argument(call.argument(*place)) : PlainArgument{}, ndim);
}

bool is_one_cut(const DTensorSpec& spec, const std::vector<int64_t>& dims) {
  return std::any_of(dims.begin(), dims.end(), [&](int64_t dim) { return spec.is_cut(dim); });
}

int64_t count_along(at::IntArrayRef shape, const std::vector<int64_t>& dims) {
  int64_t count = 1;
  for (const int64_t dim : dims) count *= shape[static_cast<size_t>(dim)];
  return count;
}

// mean(self, dtype), mean(self, dim, keepdim, dtype)
template <bool has_dims>
std::vector<c10::IValue> mean_of_part(OperatorCall& call, const PlacedOnMesh& placed) {
  const DTensorSpec self = placed.operand(0);
  const at::Tensor local = call.argument(0).toTensor();
  const auto dims = dims_at(call, has_dims ? std::optional<size_t>(1) : std::nullopt, local.dim());
  if (!is_one_cut(self, dims)) return call.run();
  const bool keepdim = has_dims && call.argument(2).toBool();
  const c10::IValue& dtype = call.argument(has_dims ? 3 : 1);
  const auto type = dtype.isNone() ? local.scalar_type() : dtype.toScalarType();
  TORCH_CHECK(c10::isFloatingType(type), call.name(), ": mean needs a floating-point dtype, got ",
              type);
  return {at::sum(local, dims, keepdim, type).div_(count_along(self.shape(), dims))};
}

c10::Scalar lowest(c10::ScalarType type) {
  if (type == c10::ScalarType::Bool) return false;
  if (c10::isFloatingType(type)) return -std::numeric_limits<double>::infinity();
  return AT_DISPATCH_INTEGRAL_TYPES(
      type, "amax", [] { return c10::Scalar(std::numeric_limits<scalar_t>::lowest()); });
}

c10::Scalar highest(c10::ScalarType type) {
  if (type == c10::ScalarType::Bool) return true;
  if (c10::isFloatingType(type)) return std::numeric_limits<double>::infinity();
  return AT_DISPATCH_INTEGRAL_TYPES(
      type, "amin", [] { return c10::Scalar(std::numeric_limits<scalar_t>::max()); });
}

// What lowers nothing, or raises nothing.
at::Tensor neutral(const at::Tensor& local, const std::vector<int64_t>& shape, bool is_greatest) {
  const auto type = local.scalar_type();
  return at::full(shape, is_greatest ? lowest(type) : highest(type), local.options());
}

// The extrema of a part of which a reduced dimension is empty, though the whole's is not.
template <std::optional<size_t> (*place)(), bool... is_greatest>
std::vector<c10::IValue> extrema_of_part(OperatorCall& call, const PlacedOnMesh& placed) {
  const at::Tensor local = call.argument(0).toTensor();
  const DTensorSpec self = placed.operand(0);
  const auto dims = dims_at(call, place(), local.dim());
  if (count_along(local.sizes(), dims) > 0 || count_along(self.shape(), dims) == 0)
    return call.run();
  const auto shape = placed.result(0).local_shape(placed.mesh().coordinate());
  return {neutral(local, shape, is_greatest)...};
}

std::optional<size_t> no_dims() { return std::nullopt; }
std::optional<size_t> first_argument() { return 1; }

}  // namespace

void add_reduction(OpTable& table) {
  using Op = Partial::Op;
  const ReducedTerms sum{Op::kSum, {Op::kSum, Op::kAvg}}, count{Op::kSum, {}};
  const ReducedTerms product{Op::kProduct, {Op::kProduct}};
  const ReducedTerms greatest{Op::kMax, {Op::kMax}}, least{Op::kMin, {Op::kMin}};
  table.add("sum.", {.strategy = reduction(all_reduced, {sum})});
  table.add("sum.dim_IntList", {.strategy = reduction(reduced<1>, {sum})});
  table.add("mean.",
            {.strategy = reduction(all_reduced, {sum}), .local_kernel = mean_of_part<false>});
  table.add("mean.dim",
            {.strategy = reduction(reduced<1>, {sum}), .local_kernel = mean_of_part<true>});
  table.add("nansum.", {.strategy = reduction(reduced<1>, {count})});
  for (const char* name : {"count_nonzero.", "count_nonzero.dim_IntList"})
    table.add(name, {.strategy = reduction(gone<1>, {count})});
  table.add("prod.", {.strategy = reduction(all_reduced, {product})});
  table.add("prod.dim_int", {.strategy = reduction(reduced<1>, {product})});
  table.add("any.", {.strategy = reduction(all_reduced, {greatest})});
  table.add("any.dim", {.strategy = reduction(reduced<1>, {greatest})});
  table.add("any.dims", {.strategy = reduction(reduced_if_given, {greatest})});
  table.add("all.", {.strategy = reduction(all_reduced, {least})});
  table.add("all.dim", {.strategy = reduction(reduced<1>, {least})});
  table.add("all.dims", {.strategy = reduction(reduced_if_given, {least})});
  table.add("max.", {.strategy = reduction(all_reduced, {greatest}),
                     .local_kernel = extrema_of_part<no_dims, true>});
  table.add("min.", {.strategy = reduction(all_reduced, {least}),
                     .local_kernel = extrema_of_part<no_dims, false>});
  table.add("amax.", {.strategy = reduction(reduced<1>, {greatest}),
                      .local_kernel = extrema_of_part<first_argument, true>});
  table.add("amin.", {.strategy = reduction(reduced<1>, {least}),
                      .local_kernel = extrema_of_part<first_argument, false>});
  table.add("aminmax.", {.strategy = reduction(reduced<1>, {{Op::kMin, {}}, {Op::kMax, {}}}),
                         .local_kernel = extrema_of_part<first_argument, false, true>});
}

}  // namespace fsdp::internal
