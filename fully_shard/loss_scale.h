// The factor of a scaled loss: halved after a step whose gradients are not finite,
// doubled after enough steps that were. Pure. As torch.amp.GradScaler does.
#pragma once

#include <cstdint>

namespace fsdp {

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;  // finite steps in a row before the factor grows
  bool enabled = true;             // false: a scaler that scales nothing, for code that has one
};

namespace internal {

class LossScale {
 public:
  // Throws std::invalid_argument for a factor that is not positive and finite, a growth
  // factor that does not grow, a backoff factor that does not shrink, or an interval
  // below 1.
  explicit LossScale(const GradScalerOptions& options);

  double value() const { return value_; }
  int64_t finite_steps() const { return finite_steps_; }
  void step_was_finite();
  void step_was_not_finite();
  void set(double value, int64_t finite_steps);

 private:
  GradScalerOptions options_;
  double value_;
  int64_t finite_steps_ = 0;  // in a row, since the value changed
};

}  // namespace internal
}  // namespace fsdp
