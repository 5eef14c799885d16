#include "optim/owned_step.h"

#include "dtensor/dtensor.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "optim/internal/owner_buckets.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp {
namespace {

bool is_whole_or_nothing(const Placement& placement) {
  return placement.is_replicate() || placement.is_owned();
}

// Whether ranks have parts of it, so that it travels.
bool is_cut(const at::Tensor& param) {
  const auto* const meta = internal::find_meta(param);
  if (meta == nullptr) return false;
  const auto& layout = meta->spec.layout();
  for (size_t m = 0; m < layout.placements().size(); ++m)
    if (layout.mesh_shape()[m] > 1 && !is_whole_or_nothing(layout.placements()[m])) return true;
  return false;
}

at::Tensor as_sent(const at::Tensor& part, at::ScalarType dtype) {
  return part.to(dtype).contiguous();
}

// Of state: on the ranks that have `param`, each whole or not at all.
std::vector<Placement> placements_of_whole(const at::Tensor& param) {
  std::vector<Placement> placements;
  for (const Placement& placement : internal::spec_of(param).placements())
    placements.push_back(placement.is_ragged() ? placement.along(0) : Placement(Replicate{}));
  return placements;
}

std::vector<Placement> placements_of_owner(const std::vector<int64_t>& owner) {
  std::vector<Placement> placements;
  for (const int64_t coordinate : owner) placements.push_back(Owned{coordinate});
  return placements;
}

}  // namespace

struct OwnedStep::Plan {
  std::vector<at::Tensor> params;
  OwnedStepOptions options;
  std::vector<size_t> cut;        // positions of the parameters that travel
  std::vector<int64_t> place_in;  // by position: where in `cut`; -1: it is whole on each rank
  internal::OwnerBuckets buckets;

  at::ScalarType sent_as(size_t i) const {
    return options.sent_as.value_or(params[i].scalar_type());
  }
  bool travels(size_t i) const { return place_in[i] >= 0; }
  size_t place(size_t i) const { return static_cast<size_t>(place_in[i]); }

  void check_shape(const char* what, size_t i, const at::Tensor& tensor) const {
    TORCH_CHECK_VALUE(tensor.defined() && tensor.sizes() == params[i].sizes(), options.optimizer,
                      ": the ", what, " of parameter ", i, " ",
                      tensor.defined() ? c10::str("has shape ", tensor.sizes()) : "is undefined",
                      ", expected the parameter's, ", params[i].sizes());
  }

  // This rank's part of what is computed with, laid as the parameter.
  at::Tensor input_part(size_t i, const OwnedWork& work) const {
    at::Tensor input = work.input(i);
    check_shape("input", i, input);
    if (is_dtensor(params[i])) {
      const auto& spec = internal::spec_of(params[i]);
      TORCH_CHECK_VALUE(is_dtensor(input) && internal::spec_of(input).mesh() == spec.mesh(),
                        options.optimizer, ": the input of parameter ", i,
                        " does not lie on the parameter's mesh, ", spec.mesh());
      input = internal::redistribute_dtensor(input, spec.placements());
    }
    return as_sent(internal::held_part(input), sent_as(i));
  }

  at::Tensor result_of(size_t i, const at::Tensor& whole, const OwnedWork& work) const {
    const at::Tensor result = work.compute(i, whole);
    check_shape("result", i, result);
    return as_sent(result, sent_as(i));
  }

  // Of a parameter that does not travel: on the ranks that have it.
  bool computes_here(size_t i) const {
    return internal::held_part(params[i]).numel() == params[i].numel();
  }

  void compute_here(size_t i, const OwnedWork& work) const {
    const at::Tensor part = input_part(i, work);
    const at::Tensor result = computes_here(i) ? result_of(i, part, work) : part;
    work.apply(i, is_dtensor(params[i])
                      ? internal::make_dtensor(result, internal::spec_of(params[i]))
                      : result);
  }
};

namespace {

void check_parameter(const at::Tensor& param, size_t i, const std::string& optimizer) {
  TORCH_CHECK_VALUE(param.defined(), optimizer, ": parameter ", i, " is undefined");
  TORCH_CHECK_VALUE(!is_dtensor(param) || !internal::spec_of(param).has_partial(), optimizer,
                    ": parameter ", i, " is Partial: a sum that nobody has added up");
}

}  // namespace

OwnedStep::OwnedStep(const std::vector<at::Tensor>& params, OwnedStepOptions options) {
  std::vector<size_t> cut;
  std::vector<int64_t> place_in(params.size(), -1);
  std::vector<internal::OwnedItem> items;
  for (size_t i = 0; i < params.size(); ++i) {
    check_parameter(params[i], i, options.optimizer);
    if (!is_cut(params[i])) continue;
    place_in[i] = static_cast<int64_t>(cut.size());
    cut.push_back(i);
    items.push_back({.like = params[i],
                     .cost = options.cost ? options.cost(params[i].sizes())
                                          : static_cast<double>(params[i].numel()),
                     .sent_as = options.sent_as.value_or(params[i].scalar_type())});
  }
  internal::OwnerBuckets buckets(std::move(items), options.bucket_bytes);
  plan_ = std::make_unique<const Plan>(Plan{.params = params,
                                            .options = std::move(options),
                                            .cut = std::move(cut),
                                            .place_in = std::move(place_in),
                                            .buckets = std::move(buckets)});
}

OwnedStep::~OwnedStep() = default;
OwnedStep::OwnedStep(OwnedStep&&) noexcept = default;
OwnedStep& OwnedStep::operator=(OwnedStep&&) noexcept = default;

bool OwnedStep::computes(size_t i) const {
  return plan_->travels(i) ? plan_->buckets.is_owner(plan_->place(i)) : plan_->computes_here(i);
}

at::Tensor OwnedStep::zeros(size_t i, at::IntArrayRef shape, at::ScalarType dtype) const {
  const at::Tensor& param = plan_->params.at(i);
  if (!is_dtensor(param))
    return at::zeros(shape, param.options().dtype(dtype).requires_grad(false));
  const internal::DTensorSpec spec(
      internal::spec_of(param).mesh(),
      plan_->travels(i) ? placements_of_owner(plan_->buckets.owner_of(plan_->place(i)))
                        : placements_of_whole(param),
      shape.vec());
  const auto options = internal::held_part(param).options().dtype(dtype).requires_grad(false);
  return internal::make_dtensor(at::zeros(spec.local_shape(), options), spec);
}

at::Tensor OwnedStep::local(const at::Tensor& state) {
  return is_dtensor(state) ? internal::held_part(state) : state;
}

void OwnedStep::run(const std::vector<size_t>& positions, const OwnedWork& work) const {
  const at::NoGradGuard no_grad;
  std::vector<bool> takes_part(plan_->cut.size(), false);
  std::vector<bool> is_given(plan_->params.size(), false);
  for (const size_t i : positions) {
    TORCH_CHECK_VALUE(i < plan_->params.size() && !is_given[i], plan_->options.optimizer,
                      ": position ", i,
                      " is given twice or is out of range, expected each once and ", "below ",
                      plan_->params.size());
    is_given[i] = true;
    if (plan_->travels(i)) takes_part[plan_->place(i)] = true;
  }
  for (const size_t i : positions)
    if (!plan_->travels(i)) plan_->compute_here(i, work);
  const auto& cut = plan_->cut;
  plan_->buckets.run(
      "step of " + plan_->options.optimizer, takes_part,
      {.part_of = [&](size_t k) { return plan_->input_part(cut[k], work); },
       .compute = [&](size_t k,
                      const at::Tensor& whole) { return plan_->result_of(cut[k], whole, work); },
       .apply =
           [&](size_t k, const at::Tensor& part) {
             work.apply(cut[k],
                        internal::make_dtensor(part, internal::spec_of(plan_->params[cut[k]])));
           }});
}

}  // namespace fsdp
