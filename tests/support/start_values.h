// Start values that every rank has alike. Ranks that are threads draw from one generator,
// each other numbers, and the first gather refuses that.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <utility>

namespace fsdp::testing {

inline void set_start_values(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module.parameters())
    parameter.copy_(torch::linspace(-0.5, 0.6, parameter.numel()).view(parameter.sizes()));
}

inline torch::nn::Linear make_linear(int64_t in, int64_t out) {
  torch::nn::Linear linear(in, out);
  set_start_values(*linear);
  return linear;
}

}  // namespace fsdp::testing
