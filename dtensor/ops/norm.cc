// Over a cut dimension p = 1 and 0 give Partial(sum), p = inf Partial(max), p = -inf
// Partial(min). Any other p is not a reduction of the ranks' norms, so the sum of powers
// is added up at once (collective) and the result is whole.
//
// The tensors of _foreach_norm need not lie alike. Powers that the ranks have to add up
// travel together.
#include "dtensor/dtensor.h"
#include "dtensor/ops/op_table.h"
#include "dtensor/ops/row_statistics.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/strategy/whole_dim_strategy.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double power_of(const OperatorCall& call) {
  const c10::IValue& p = call.argument(1);
  return p.isNone() ? 2.0 : p.toScalar().toDouble();
}

bool is_extremum(double p) { return std::isinf(p); }
bool adds_up(double p) { return p == 0 || p == 1; }

// What a result is where a reduced dimension is cut; whole where the ranks agree on it.
Placement across_ranks(double p) {
  if (is_extremum(p)) return Partial{p > 0 ? Partial::Op::kMax : Partial::Op::kMin};
  return adds_up(p) ? Placement(Partial{}) : Placement(Replicate{});
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

std::vector<PlacementStrategy> norm_strategy(const OpSchema& call) {
  const double* const p = call.real(1);
  const Placement across = across_ranks(p == nullptr ? 2.0 : *p);
  const Along along = norm_along(call);
  auto strategies = along_strategy(call, along, 1);
  for (const int64_t dim : along.dims) {
    strategies.push_back(
        {.results = {across}, .operands = {Shard{dim}}, .asks_other_ranks = across.is_replicate()});
  }
  return strategies;
}

std::vector<ResultGeometry> norm_results(const OpSchema& call) {
  return {along_result(call, norm_along(call))};
}

// An extremum of nothing is the neutral element.
at::Tensor norm_of(const at::Tensor& local, const NormArguments& arguments,
                   const PlacedOnMesh& placed) {
  int64_t count = 1;
  for (const int64_t dim : arguments.dims) count *= local.size(dim);
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

at::Tensor root(const at::Tensor& power, double p) {
  return p == 2 ? power.sqrt() : power.pow(1 / p);
}

// Of what does not add up, the powers do.
std::vector<c10::IValue> norm_of_part(OperatorCall& call, const PlacedOnMesh& placed) {
  const at::Tensor local = call.argument(0).toTensor();
  const NormArguments arguments(call, local.dim());
  const at::Tensor own = norm_of(local, arguments, placed);
  if (is_extremum(arguments.p) || adds_up(arguments.p)) return {own};
  const DTensorSpec self = placed.operand(0);
  const bool is_cut = std::any_of(arguments.dims.begin(), arguments.dims.end(),
                                  [&](int64_t dim) { return self.is_cut(dim); });
  if (!is_cut) return {own};
  return {root(summed_across(own.pow(arguments.p), self, arguments.dims), arguments.p)};
}

// A DTensor's norm, or the power of it that the ranks add up.
struct Powers {
  at::Tensor own;
  DTensorSpec spec;  // how they lie, as terms of a scalar
};

bool travel_together(const Powers& a, const Powers& b) {
  return a.spec == b.spec && a.own.scalar_type() == b.own.scalar_type();
}

at::Tensor norm_of_elements(const at::Tensor& local, double p,
                            std::optional<at::ScalarType> dtype) {
  if (local.numel() > 0 || (!std::isinf(p) && p >= 0))
    return at::linalg_vector_norm(local, p, std::nullopt, false, dtype);
  auto options = local.options();
  if (dtype) options = options.dtype(*dtype);
  return at::full({}, p > 0 ? 0.0 : kInfinity, options);
}

// Of a scalar to which each rank of a cut has a term.
DTensorSpec terms_of_norm(const DTensorSpec& spec, Partial::Op op) {
  std::vector<Placement> placements;
  for (size_t m = 0; m < spec.placements().size(); ++m) {
    const bool is_cut = spec.placements()[m].is_shard() && spec.mesh().shape()[m] > 1;
    placements.push_back(is_cut ? Placement(Partial{op}) : Replicate{});
  }
  return {spec.mesh(), std::move(placements), {}};
}

// The norms of `powers[i]` and those after it that travel with it, which are done then.
// Collective.
void add_up_powers(size_t i, double p, std::vector<std::optional<Powers>>& powers,
                   std::vector<at::Tensor>& norms) {
  const Powers first = *powers[i];
  std::vector<at::Tensor> own;
  std::vector<size_t> places;
  for (size_t k = i; k < powers.size(); ++k) {
    if (!powers[k] || !travel_together(*powers[k], first)) continue;
    own.push_back(powers[k]->own);
    places.push_back(k);
    powers[k].reset();
  }
  const auto count = static_cast<int64_t>(own.size());
  const DTensorSpec whole = first.spec.without_partials();
  const at::Tensor sums =
      redistribute_local(at::stack(own), first.spec.with_shape({count}), whole.placements());
  const at::Tensor roots = root(sums, p);
  for (size_t k = 0; k < places.size(); ++k)
    norms[places[k]] = make_dtensor(roots[static_cast<int64_t>(k)], whole);
}

// _foreach_norm(self, ord, dtype)
void norms_of_each(OperatorCall& call, const StrategyKernel*) {
  const auto selves = call.argument(0).toTensorVector();
  const double p = power_of(call);
  const auto dtype = call.argument(2).toOptional<at::ScalarType>();
  const bool are_terms = is_extremum(p) || adds_up(p);
  const auto op = !std::isinf(p) ? Partial::Op::kSum
                  : p > 0        ? Partial::Op::kMax
                                 : Partial::Op::kMin;
  std::vector<std::optional<Powers>> powers(selves.size());
  std::vector<at::Tensor> norms(selves.size());
  for (size_t i = 0; i < selves.size(); ++i) {
    const at::Tensor self = is_dtensor(selves[i]) ? reduce_partials(selves[i]) : selves[i];
    norms[i] = norm_of_elements(held_part(self), p, dtype);
    if (!is_dtensor(self)) continue;
    const DTensorSpec spec = terms_of_norm(spec_of(self), op);
    if (spec.has_partial() && !are_terms) {
      powers[i] = Powers{norms[i].pow(p), spec};
    } else {
      norms[i] = make_dtensor(norms[i], spec);
    }
  }
  for (size_t i = 0; i < powers.size(); ++i) {
    if (powers[i]) add_up_powers(i, p, powers, norms);
  }
  call.finish(std::move(norms));
}

}  // namespace

void add_norm(OpTable& table) {
  const OpEntry norm{
      .strategy = {.strategies = norm_strategy, .results = norm_results, .reals = {1}},
      .local_kernel = norm_of_part};
  for (const char* name : {"norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dtype",
                           "norm.ScalarOpt_dim_dtype", "linalg_vector_norm."})
    table.add(name, norm);
  table.add("_foreach_norm.Scalar", {.handler = norms_of_each});
}

}  // namespace fsdp::internal
