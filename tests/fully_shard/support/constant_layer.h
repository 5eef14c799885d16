#pragma once

#include <torch/nn/modules/linear.h>

namespace fsdp::testing {

// [width, width] with a bias, all 0.5 and so alike on every rank.
inline torch::nn::Linear constant_layer(int64_t width) {
  torch::nn::Linear layer(width, width);
  torch::NoGradGuard no_grad;
  for (auto& parameter : layer->parameters()) parameter.fill_(0.5);
  return layer;
}

}  // namespace fsdp::testing
