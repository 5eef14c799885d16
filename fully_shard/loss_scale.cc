#include "fully_shard/loss_scale.h"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace fsdp::internal {
namespace {

void check(bool holds, const char* name, double value, const char* allowed) {
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

}  // namespace

LossScale::LossScale(const GradScalerOptions& options)
    : options_(options), value_(options.init_scale) {
  check(is_scale(options.init_scale), "init_scale", options.init_scale, kScales);
  check(options.growth_factor > 1 && std::isfinite(options.growth_factor), "growth_factor",
        options.growth_factor, "above 1 and finite");
  check(options.backoff_factor > 0 && options.backoff_factor < 1, "backoff_factor",
        options.backoff_factor, "between 0 and 1");
  check(options.growth_interval >= 1, "growth_interval",
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
  check(is_scale(value), "the scale", value, kScales);
  check(finite_steps >= 0, "finite_steps", static_cast<double>(finite_steps), "0 or more");
  value_ = value;
  finite_steps_ = finite_steps;
}

}  // namespace fsdp::internal
