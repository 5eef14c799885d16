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
#include <map>
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
  DTensorSpecPtr spec;
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
  const DTensorSpec& spec = *spec_of(self);
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
at::Tensor finish_powers(const NormTerm& term, double p) {
  const auto placements = without_partials(term.spec->placements);
  const at::Tensor power = redistribute_local(term.value, *term.spec, placements);
  return make_dtensor(root(power, p), intern_spec({term.spec->mesh, placements, term.spec->shape,
                                                   term.spec->stride}));
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
  call.finish(term.is_power ? finish_powers(term, request.p) : make_dtensor(term.value, term.spec));
}

// Whole norms for all elements that are still powers, with one collective per spec.
void finish_all_powers(const std::vector<NormTerm>& terms, double p,
                       std::vector<at::Tensor>& norms) {
  std::map<std::pair<const DTensorSpec*, at::ScalarType>, std::vector<size_t>> groups;
  std::vector<std::pair<const DTensorSpec*, at::ScalarType>>
      order;  // the same on every rank, unlike the pointers'
  for (size_t i = 0; i < terms.size(); ++i) {
    if (!terms[i].is_power) continue;
    const std::pair key{terms[i].spec.get(), terms[i].value.scalar_type()};
    auto& members = groups[key];
    if (members.empty()) order.push_back(key);
    members.push_back(i);
  }
  for (const auto& key : order) {
    std::vector<at::Tensor> powers;
    for (size_t i : groups[key]) powers.push_back(terms[i].value);
    DTensorSpec list = *key.first;
    list.shape = {static_cast<int64_t>(powers.size())};
    list.stride = {1};
    const auto whole =
        finish_powers({.value = at::stack(powers), .spec = intern_spec(std::move(list))}, p);
    const auto placements = without_partials(key.first->placements);
    const auto spec = intern_spec({key.first->mesh, placements, {}, {}});
    for (size_t k = 0; k < powers.size(); ++k) {
      norms[groups[key][k]] = make_dtensor(local_of(whole)[static_cast<int64_t>(k)], spec);
    }
  }
}

void foreach_norm_rule(OperatorCall& call) {
  const auto selves = call.argument(0).toTensorVector();
  const double p = power_of(call);
  const auto dtype = dtype_of(call);
  std::vector<NormTerm> terms(selves.size());
  std::vector<at::Tensor> norms(selves.size());
  for (size_t i = 0; i < selves.size(); ++i) {
    if (!is_dtensor(selves[i])) {
      norms[i] = at::linalg_vector_norm(selves[i], p, std::nullopt, false, dtype);
      continue;
    }
    terms[i] = norm_term(selves[i], {p, ReducedDims::all_of(selves[i]), dtype});
    if (!terms[i].is_power) norms[i] = make_dtensor(terms[i].value, terms[i].spec);
  }
  finish_all_powers(terms, p, norms);
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
