#include "fully_shard/grad_scaler.h"

#include "device_mesh/on_mesh/mesh_collectives.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/train/same_parameters.h"

#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace fsdp {
namespace {

void check_factor(bool holds, const char* name, double value, const char* allowed) {
  if (!holds)
    throw std::invalid_argument("GradScaler: " + std::string(name) + " is " +
                                std::to_string(value) + "; it must be " + allowed);
}

// As float32, in which gradients are scaled back.
bool is_scale(double value) {
  using Float = std::numeric_limits<float>;
  return value >= static_cast<double>(Float::min()) && value <= static_cast<double>(Float::max());
}

constexpr const char* kScales = "a positive and normal float32";

using Tensors = std::vector<at::Tensor>;

// `body`'s std::invalid_argument as the error that the rest of the library throws.
template <class Body>
auto as_value_error(const Body& body) {
  try {
    return body();
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

// Each once, though a tied parameter be listed twice.
Tensors gradients_of(const torch::optim::Optimizer& optimizer, int64_t rank) {
  Tensors gradients;
  std::unordered_set<const c10::TensorImpl*> known;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& param : group.params()) {
      const auto& gradient = param.grad();
      if (!gradient.defined()) continue;
      TORCH_CHECK_VALUE(gradient.scalar_type() != at::kHalf, "GradScaler: a parameter of shape ",
                        param.sizes(),
                        " has a gradient in fp16, which lost what scaling is to save; keep "
                        "parameters in fp32 and compute in fp16 by MixedPrecisionPolicy's "
                        "param_dtype (rank ",
                        rank, ")");
      if (known.insert(gradient.unsafeGetTensorImpl()).second) gradients.push_back(gradient);
    }
  }
  return gradients;
}

// Ranks that divide by different scales, or unscale different models, would train on with
// a sum of both gradients. On devices units may have other numbers on other replicas.
internal::Claims claims_of(double scale, const torch::optim::Optimizer& optimizer,
                           const DeviceMesh& mesh) {
  internal::Claims claims("GradScaler");
  claims.add("the scale", scale);
  if (mesh.device_type() != c10::kCPU) return claims;
  Tensors parameters;
  for (const auto& group : optimizer.param_groups())
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  internal::claim_parameters(claims, parameters);
  return claims;
}

// This rank's parts that have elements, by what one kernel takes.
std::vector<Tensors> parts_by_kind(const Tensors& gradients) {
  std::vector<Tensors> kinds;
  for (const auto& gradient : gradients) {
    const bool distributed = internal::find_meta(gradient) != nullptr;
    const auto& part = distributed ? internal::local_of(gradient) : gradient;
    if (part.numel() == 0) continue;
    const auto is_alike = [&](const Tensors& kind) {
      return kind.front().device() == part.device() &&
             kind.front().scalar_type() == part.scalar_type();
    };
    const auto found = std::find_if(kinds.begin(), kinds.end(), is_alike);
    (found == kinds.end() ? kinds.emplace_back() : *found).push_back(part);
  }
  return kinds;
}

}  // namespace

namespace internal {

LossScale::LossScale(const GradScalerOptions& options)
    : options_(options), value_(options.init_scale) {
  check_factor(is_scale(options.init_scale), "init_scale", options.init_scale, kScales);
  check_factor(options.growth_factor > 1 && std::isfinite(options.growth_factor), "growth_factor",
               options.growth_factor, "above 1 and finite");
  check_factor(options.backoff_factor > 0 && options.backoff_factor < 1, "backoff_factor",
               options.backoff_factor, "between 0 and 1");
  check_factor(options.growth_interval >= 1, "growth_interval",
               static_cast<double>(options.growth_interval), "1 or more");
}

void LossScale::step_was_finite() {
  if (++finite_steps_ < options_.growth_interval) return;
  finite_steps_ = 0;
  if (is_scale(value_ * options_.growth_factor)) value_ *= options_.growth_factor;
}

void LossScale::step_was_not_finite() {
  finite_steps_ = 0;
  if (is_scale(value_ * options_.backoff_factor)) value_ *= options_.backoff_factor;
}

void LossScale::set(double value, int64_t finite_steps) {
  check_factor(is_scale(value), "the scale", value, kScales);
  check_factor(finite_steps >= 0, "finite_steps", static_cast<double>(finite_steps), "0 or more");
  value_ = value;
  finite_steps_ = finite_steps;
}

}  // namespace internal

GradScaler::GradScaler(const DeviceMesh& mesh, const GradScalerOptions& options)
    : mesh_(mesh),
      enabled_(options.enabled),
      scale_(as_value_error([&] { return internal::LossScale(options); })) {}

double GradScaler::get_scale() const { return enabled_ ? scale_.value() : 1; }

at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  return enabled_ ? loss.mul(scale_.value()) : loss;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!enabled_) return;
  TORCH_CHECK_VALUE(!visits_.contains(&optimizer),
                    "GradScaler: unscale_() or step() was called before for this optimizer since "
                    "the last update(), and its gradients are divided by the scale once (rank ",
                    mesh_.rank(), ")");
  const auto found = unscale_gradients(optimizer);
  auto& visit = visits_[&optimizer];  // not finite where the ranks do not agree
  visit.finite = is_finite_everywhere(found, optimizer);
}

at::Tensor GradScaler::unscale_gradients(const torch::optim::Optimizer& optimizer) const {
  const c10::NoGradGuard no_grad;
  const auto gradients = gradients_of(optimizer, mesh_.rank());
  for (const auto& gradient : gradients) internal::tell_write(gradient);
  auto found = at::zeros({1}, at::TensorOptions(mesh_.device_type()).dtype(at::kFloat));
  for (const auto& parts : parts_by_kind(gradients)) {
    const auto options = found.options().device(parts.front().device());
    auto found_here = at::zeros({1}, options);
    at::_amp_foreach_non_finite_check_and_unscale_(parts, found_here,
                                                   at::full({1}, 1 / scale_.value(), options));
    found.add_(found_here.to(found.device()));
  }
  return found;
}

bool GradScaler::is_finite_everywhere(const at::Tensor& found,
                                      const torch::optim::Optimizer& optimizer) const {
  const auto claims = claims_of(scale_.value(), optimizer, mesh_);
  const auto row =
      at::cat({found.to(at::kDouble), claims.words().view(at::kDouble).to(found.device())});
  const auto of_all =
      internal::rows_of_all(internal::collectives_of(mesh_),
                            {.row = row, .what = "agreement of GradScaler", .call = "GradScaler"})
          .cpu();
  claims.check_words(of_all.slice(1, 1).contiguous().view(at::kLong), mesh_,
                     "give every rank the same options, state and parameters, in one order, and "
                     "call update() on all; the gradients were divided, and step() steps with "
                     "none");
  return !of_all.select(1, 0).any().item<bool>();  // a count that is not finite says so too
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (enabled_ && !visits_.contains(&optimizer)) unscale_(optimizer);
  if (enabled_) {
    auto& visit = visits_.at(&optimizer);
    TORCH_CHECK_VALUE(visit.stage != Stage::kStepped,
                      "GradScaler: step() was called before for this optimizer since the last "
                      "update() (rank ",
                      mesh_.rank(), ")");
    visit.stage = Stage::kStepped;
    if (!visit.finite) return false;
  }
  optimizer.step();
  return true;
}

void GradScaler::update() {
  if (!enabled_) return;
  TORCH_CHECK_VALUE(!visits_.empty(),
                    "GradScaler: update() without a step() or unscale_() since the last one (rank ",
                    mesh_.rank(), ")");
  const auto visits = std::exchange(visits_, {});
  const bool finite = std::all_of(visits.begin(), visits.end(),
                                  [](const auto& item) { return item.second.finite; });
  finite ? scale_.step_was_finite() : scale_.step_was_not_finite();
}

GradScalerState GradScaler::state() const { return {scale_.value(), scale_.finite_steps()}; }

void GradScaler::load_state(const GradScalerState& state) {
  as_value_error([&] { scale_.set(state.scale, state.finite_steps); });
}

}  // namespace fsdp
