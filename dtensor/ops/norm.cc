// Over a cut dimension p = 1 and 0 give Partial(sum), p = inf Partial(max), p = -inf
// Partial(min). Any other p is not a reduction of the ranks' norms, so the sum of powers
// is added up at once (collective) and the result is whole.
#include "dtensor/ops/norm.h"

#include "dtensor/ops/exchange.h"
#include "dtensor/ops/op_table.h"
#include "dtensor/strategy/along_strategy.h"

#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

namespace fsdp::internal {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double power_of(const OperatorCall& call) {
  const c10::IValue& p = call.argument(1);
  return p.isNone() ? 2.0 : p.toScalar().toDouble();
}

// norm(self, p, dim, keepdim, dtype), norm(self, p, dtype), norm(self, p).
struct NormArguments {
  explicit NormArguments(const OperatorCall& call, int64_t ndim)
      : p(power_of(call)), dims(given_dims(PlainArgument{}, ndim)) {
    if (call.argument_count() >= 4) {
      dims = given_dims(plain_argument(call.argument(2)), ndim);
      keepdim = call.argument(3).toBool();
    }
    const bool has_dtype = call.argument_count() == 3 || call.argument_count() == 5;
    const c10::IValue& last = call.argument(call.argument_count() - 1);
    if (has_dtype && !last.isNone()) dtype = last.toScalarType();
  }

  double p;
  std::vector<int64_t> dims;
  bool keepdim = false;
  std::optional<at::ScalarType> dtype = {};
};

Along norm_along(const OpSchema& call) {
  return call.plain.size() >= 4 ? reduced<2>(call) : all_reduced(call);
}

// Results are `across` where a reduced dimension is cut; whole ones the ranks agree on.
OpStrategy norm_strategy(const Placement& across) {
  return {.strategies =
              [=](const OpSchema& call) {
                const Along along = norm_along(call);
                auto strategies = along_strategy(call, along, 1);
                for (int64_t dim : along.dims) {
                  strategies.push_back({.results = {across},
                                        .operands = {Shard{dim}},
                                        .asks_other_ranks = across.is_replicate()});
                }
                return strategies;
              },
          .results =
              [](const OpSchema& call) {
                return std::vector<ResultGeometry>{along_result(call, norm_along(call))};
              }};
}

// An extremum of nothing is the neutral element.
at::Tensor norm_of(const at::Tensor& local, const NormArguments& arguments,
                   const PlacedOnMesh& placed) {
  int64_t count = 1;
  for (int64_t dim : arguments.dims) count *= local.size(dim);
  if (count == 0 && (std::isinf(arguments.p) || arguments.p < 0)) {
    const auto shape = placed.result(0).local_shape(placed.mesh().coordinate());
    auto options = local.options();
    if (arguments.dtype) options = options.dtype(*arguments.dtype);
    return at::full(shape, arguments.p > 0 ? 0.0 : kInfinity, options);
  }
  if (local.dim() == 0)
    return at::linalg_vector_norm(local, arguments.p, std::nullopt, false, arguments.dtype);
  return at::linalg_vector_norm(local, arguments.p, arguments.dims, arguments.keepdim,
                                arguments.dtype);
}

std::vector<c10::IValue> norm_of_part(OperatorCall& call, const PlacedOnMesh& placed) {
  const at::Tensor local = call.argument(0).toTensor();
  return {norm_of(local, NormArguments(call, local.dim()), placed)};
}

at::Tensor root(const at::Tensor& power, double p) {
  return p == 2 ? power.sqrt() : power.pow(1 / p);
}

// Of what does not add up, the powers do.
std::vector<c10::IValue> norm_by_powers(OperatorCall& call, const PlacedOnMesh& placed) {
  const at::Tensor local = call.argument(0).toTensor();
  const NormArguments arguments(call, local.dim());
  const DTensorSpec self = placed.operand(0);
  const at::Tensor own = norm_of(local, arguments, placed);
  const bool is_cut = std::any_of(arguments.dims.begin(), arguments.dims.end(),
                                  [&](int64_t dim) { return self.is_cut(dim); });
  if (!is_cut) return {own};
  return {root(summed_across(own.pow(arguments.p), self, arguments.dims), arguments.p)};
}

// Of one operator.
struct NormKernels {
  explicit NormKernels(const c10::OperatorHandle& op)
      : sums(norm_strategy(Partial{}), op, norm_of_part),
        greatest(norm_strategy(Partial{Partial::Op::kMax}), op, norm_of_part),
        least(norm_strategy(Partial{Partial::Op::kMin}), op, norm_of_part),
        powers(norm_strategy(Replicate{}), op, norm_by_powers) {}

  const StrategyKernel& of(double p) const {
    if (std::isinf(p)) return p > 0 ? greatest : least;
    return p == 0 || p == 1 ? sums : powers;
  }

  StrategyKernel sums, greatest, least, powers;
};

// One for each operator, which has kernels of its own.
template <size_t>
void run_norm(OperatorCall& call, const StrategyKernel*) {
  static const NormKernels kernels(call.handle());
  kernels.of(power_of(call)).run(call);
}

}  // namespace

void add_norm(OpTable& table) {
  table.add("norm.Scalar", {.handler = run_norm<0>});
  table.add("norm.ScalarOpt_dim", {.handler = run_norm<1>});
  table.add("norm.ScalarOpt_dtype", {.handler = run_norm<2>});
  table.add("norm.ScalarOpt_dim_dtype", {.handler = run_norm<3>});
  table.add("linalg_vector_norm.", {.handler = run_norm<4>});
}

}  // namespace fsdp::internal
