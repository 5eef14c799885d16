#pragma once

#include "tests/support/start_values.h"

#include <torch/torch.h>

namespace fsdp::testing {

// Three layers [width, width] with a tanh between them.
struct TrioImpl : torch::nn::Module {
  explicit TrioImpl(int64_t width)
      : a(register_module("a", make_linear(width, width))),
        b(register_module("b", make_linear(width, width))),
        c(register_module("c", make_linear(width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) { return c(torch::tanh(b(torch::tanh(a(x))))); }
  torch::nn::Linear a, b, c;
};
TORCH_MODULE(Trio);

}  // namespace fsdp::testing
