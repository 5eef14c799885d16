// Norms. Over a cut dimension: p = 1 and 0 give Partial(sum), p = inf Partial(max), p =
// -inf Partial(min). Any other p is not a reduction of the ranks' norms, so the sum of
// powers is reduced at once (collective) and the result is whole.
#include "dtensor/dtensor.h"
#include "dtensor/families/reduction.h"
#include "dtensor/families/rules.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/redistribute.h"

#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct NormRequest {
  double p;
  ReducedDims dims;
  std::optional<at::ScalarType> dtype;
};

// One rank's share of a norm over cut dimensions: the norm itself, or its p-th power
// where those are what adds up.
struct NormTerm {
  at::Tensor value;
  DTensorSpec spec;
  bool is_power = false;
};

at::Tensor local_norm(const at::Tensor& local, const NormRequest& request) {
  const bool nothing = request.dims.count(local.sizes()) == 0;
  if (nothing && (std::isinf(request.p) || request.p < 0)) {
    const double neutral = request.p > 0 ? 0.0 : kInfinity;
    auto options = local.options();
    if (request.dtype.has_value()) options = options.dtype(*request.dtype);
    return at::full(request.dims.shape_after(local.sizes()), neutral, options);
  }
  if (local.dim() == 0)
    return at::linalg_vector_norm(local, request.p, std::nullopt, false, request.dtype);
  return at::linalg_vector_norm(local, request.p, request.dims.dims, request.dims.keepdim,
                                request.dtype);
}

NormTerm norm_term(const at::Tensor& given, const NormRequest& request) {
  const at::Tensor self = reduce_partials(given);
  const DTensorSpec& spec = spec_of(self);
  at::Tensor value = local_norm(local_of(self), request);
  if (!crosses_ranks(spec, request.dims)) {
    return {.value = std::move(value), .spec = reduced_spec(spec, request.dims, Replicate{})};
  }
  if (request.p == kInfinity) {
    return {.value = std::move(value),
            .spec = reduced_spec(spec, request.dims, Partial{Partial::Op::kMax})};
  }
  if (request.p == -kInfinity) {
    return {.value = std::move(value),
            .spec = reduced_spec(spec, request.dims, Partial{Partial::Op::kMin})};
  }
  const bool is_power = request.p != 0 && request.p != 1;
  if (is_power) value = value.pow(request.p);
  return {.value = std::move(value),
          .spec = reduced_spec(spec, request.dims, Partial{}),
          .is_power = is_power};
}

at::Tensor root(const at::Tensor& power, double p) {
  return p == 2 ? power.sqrt() : power.pow(1 / p);
}

// The whole norm from the ranks' powers. Collective.
at::Tensor finish_powers(const at::Tensor& powers, const DTensorSpec& spec, double p) {
  const DTensorSpec whole = spec.without_partials();
  return make_dtensor(root(redistribute_local(powers, spec, whole.placements()), p), whole);
}

std::optional<at::ScalarType> dtype_of(OperatorCall& call) {
  const c10::IValue* dtype = call.find_argument("dtype");
  if (dtype == nullptr || dtype->isNone()) return std::nullopt;
  return dtype->toScalarType();
}

double power_of(OperatorCall& call) {
  const c10::IValue* p = call.find_argument("p");
  if (p == nullptr) p = call.find_argument("ord");
  return p->isNone() ? 2.0 : p->toScalar().toDouble();
}

void norm_rule(OperatorCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  const NormRequest request{power_of(call), ReducedDims::of(call, self), dtype_of(call)};
  const NormTerm term = norm_term(self, request);
  call.finish(term.is_power ? finish_powers(term.value, term.spec, request.p)
                            : make_dtensor(term.value, term.spec));
}

bool travel_together(const NormTerm& a, const NormTerm& b) {
  return a.spec == b.spec && a.value.scalar_type() == b.value.scalar_type();
}

using NormTerms = std::vector<std::optional<NormTerm>>;

// Terms `i` and those after it that are powers like it, which are done then. Collective.
void finish_powers_like(size_t i, double p, NormTerms& terms, std::vector<at::Tensor>& norms) {
  const NormTerm first = *terms[i];
  std::vector<at::Tensor> powers;
  std::vector<size_t> places;
  for (size_t k = i; k < terms.size(); ++k) {
    if (!terms[k] || !travel_together(*terms[k], first)) continue;
    powers.push_back(terms[k]->value);
    places.push_back(k);
    terms[k].reset();
  }
  const auto count = static_cast<int64_t>(powers.size());
  const auto whole = finish_powers(at::stack(powers), first.spec.with_shape({count}), p);
  const DTensorSpec spec = first.spec.without_partials();
  for (size_t k = 0; k < places.size(); ++k)
    norms[places[k]] = make_dtensor(local_of(whole)[static_cast<int64_t>(k)], spec);
}

void foreach_norm_rule(OperatorCall& call) {
  const auto selves = call.argument(0).toTensorVector();
  const double p = power_of(call);
  const auto dtype = dtype_of(call);
  NormTerms powers(selves.size());
  std::vector<at::Tensor> norms(selves.size());
  for (size_t i = 0; i < selves.size(); ++i) {
    if (!is_dtensor(selves[i])) {
      norms[i] = at::linalg_vector_norm(selves[i], p, std::nullopt, false, dtype);
      continue;
    }
    NormTerm term = norm_term(selves[i], {p, ReducedDims::all_of(selves[i]), dtype});
    if (term.is_power) {
      powers[i] = std::move(term);
    } else {
      norms[i] = make_dtensor(term.value, term.spec);
    }
  }
  for (size_t i = 0; i < powers.size(); ++i) {
    if (powers[i]) finish_powers_like(i, p, powers, norms);
  }
  call.finish(std::move(norms));
}

}  // namespace

void add_norm_rules(RuleTable& table) {
  for (const char* name : {"norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dtype",
                           "norm.ScalarOpt_dim_dtype", "linalg_vector_norm."}) {
    table[name] = norm_rule;
  }
  table["_foreach_norm.Scalar"] = foreach_norm_rule;
}

}  // namespace fsdp::internal
