#pragma once

#include "tests/support/start_values.h"

#include <torch/torch.h>

namespace fsdp::testing {

// Two layers [4, 4] with a tanh between them.
struct PairImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return second(torch::tanh(first(x))); }
  torch::nn::Linear first = register_module("first", make_linear(4, 4));
  torch::nn::Linear second = register_module("second", make_linear(4, 4));
};
TORCH_MODULE(Pair);

}  // namespace fsdp::testing
