// The tensors need not lie alike. Powers that the ranks have to add up travel together.
#include "dtensor/dtensor.h"
#include "dtensor/ops/families.h"
#include "dtensor/ops/op_table.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>

#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

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
  return at::full({}, p > 0 ? 0.0 : std::numeric_limits<double>::infinity(), options);
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
  const at::Tensor roots = p == 2 ? sums.sqrt() : sums.pow(1 / p);
  for (size_t k = 0; k < places.size(); ++k)
    norms[places[k]] = make_dtensor(roots[static_cast<int64_t>(k)], whole);
}

// _foreach_norm(self, ord, dtype)
void norms_of_each(OperatorCall& call, const StrategyKernel*) {
  const auto selves = call.argument(0).toTensorVector();
  const c10::IValue& ord = call.argument(1);
  const double p = ord.isNone() ? 2.0 : ord.toScalar().toDouble();
  const auto dtype = call.argument(2).toOptional<at::ScalarType>();
  const bool adds_up = std::isinf(p) || p == 0 || p == 1;
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
    if (spec.has_partial() && !adds_up) {
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

void add_foreach_norm(OpTable& table) {
  table.add("_foreach_norm.Scalar", {.handler = norms_of_each});
}

}  // namespace fsdp::internal
