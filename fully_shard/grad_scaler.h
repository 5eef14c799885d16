// Training in fp16 without losing small gradients: the loss is scaled up before backward,
// gradients are scaled back before the step, and a step whose gradients are not finite on
// some rank is left out on all. As torch.amp.GradScaler, agreed over a mesh.
//
//   fsdp::GradScaler scaler(mesh);
//   scaler.scale(loss).backward();
//   scaler.unscale_(optimizer);                       // only where gradients are looked at,
//   fsdp::clip_grad_norm_(model->parameters(), 1.0);  // as here
//   scaler.step(optimizer);
//   scaler.update();
#pragma once

#include "device_mesh/api.h"
#include "device_mesh/device_mesh.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>

namespace torch::optim {
class Optimizer;
}

namespace fsdp {

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;  // finite steps in a row before the factor grows
  bool enabled = true;             // false: a scaler that scales nothing, for code that has one
};

namespace internal {

// The factor of a scaled loss: halved after a step whose gradients are not finite,
// doubled after enough steps that were. Pure.
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

// What a checkpoint of a scaler is; the same on all ranks.
struct GradScalerState {
  double scale = 0;
  int64_t finite_steps = 0;  // in a row
};

class FSDP_API GradScaler {
 public:
  // `mesh` has all ranks that train the model. Local. Throws ValueError for options out
  // of range.
  explicit GradScaler(const DeviceMesh& mesh, const GradScalerOptions& options = {});

  // `loss` times the scale, of the same dtype and differentiable. Local.
  [[nodiscard]] at::Tensor scale(const at::Tensor& loss) const;

  // Divides the gradients of the optimizer's parameters by the scale, in place, and finds
  // out whether those of some rank are not finite. Collective over the mesh; waits for
  // the device. At most once per optimizer between updates: ValueError otherwise, or for
  // a gradient in fp16, which had lost what scaling is to save (nothing is changed then).
  // ValueError on all ranks alike where ranks divide by other scales, or those of one
  // mesh give optimizers of different parameters: the gradients are divided then, and
  // step() leaves the step out.
  void unscale_(torch::optim::Optimizer& optimizer);

  // unscale_(), unless it was called, and the optimizer's step, unless a gradient of some
  // rank is not finite: false then, on all ranks alike. Collective over the mesh. Throws
  // ValueError for a second step between updates.
  bool step(torch::optim::Optimizer& optimizer);

  // Adjusts the scale to what the steps since the last update found, after the last
  // optimizer's. Local, and the same on all ranks. Throws ValueError where nothing was
  // unscaled.
  void update();

  double get_scale() const;  // 1 where not enabled
  [[nodiscard]] GradScalerState state() const;
  // Throws ValueError for a scale that is no positive normal float32. Local.
  void load_state(const GradScalerState& state);

 private:
  enum class Stage { kUnscaled, kStepped };
  struct Visit {
    Stage stage = Stage::kUnscaled;
    bool finite = false;
  };

  // How many parts had what is not finite: [1], not agreed.
  at::Tensor unscale_gradients(const torch::optim::Optimizer& optimizer) const;
  bool is_finite_everywhere(const at::Tensor& found,
                            const torch::optim::Optimizer& optimizer) const;

  DeviceMesh mesh_;
  bool enabled_;
  internal::LossScale scale_;
  std::map<const torch::optim::Optimizer*, Visit> visits_;  // since the last update
};

}  // namespace fsdp
