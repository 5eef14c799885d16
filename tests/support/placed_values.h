// Numbers for parameters and gradients, plain or distributed, that depend on their place
// alone. The same in tests/checkpoint/fixtures/continue_muon.py.
#pragma once

#include "dtensor/dtensor.h"

#include <torch/types.h>

#include <cstdint>
#include <vector>

namespace fsdp::testing {

// Numbers that look random, the same on all ranks.
inline torch::Tensor values_of(const std::vector<int64_t>& shape, double seed) {
  const auto count = c10::multiply_integers(shape);
  return (torch::arange(count, torch::kDouble) * 0.7 + seed).sin().to(torch::kFloat).view(shape);
}

// This rank's part of it, where `like` is distributed.
inline torch::Tensor placed_like(const torch::Tensor& like, const torch::Tensor& whole) {
  if (!is_dtensor(like)) return whole;
  const DTensor distributed(like);
  return distribute_tensor(whole, distributed.device_mesh(), distributed.placements());
}

// Sets gradients that depend on the step and on where the parameter is.
inline void set_gradients(const std::vector<torch::Tensor>& params, int64_t step) {
  for (size_t i = 0; i < params.size(); ++i) {
    const double seed = 100.0 + static_cast<double>(i) + 10.0 * static_cast<double>(step);
    params[i].mutable_grad() = placed_like(params[i], values_of(params[i].sizes().vec(), seed));
  }
}

inline void set_values(const std::vector<torch::Tensor>& params) {
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < params.size(); ++i)
    params[i].copy_(
        placed_like(params[i], values_of(params[i].sizes().vec(), static_cast<double>(i))));
}

}  // namespace fsdp::testing
