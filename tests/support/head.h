// A projection without a bias whose weight may be another module's, as of an embedding.
#pragma once

#include <torch/torch.h>

namespace fsdp::testing {

struct HeadImpl : torch::nn::Module {
  explicit HeadImpl(const torch::Tensor& values) : weight(register_parameter("weight", values)) {}
  torch::Tensor forward(const torch::Tensor& x) { return torch::linear(x, weight); }
  torch::Tensor weight;
};
TORCH_MODULE(Head);

}  // namespace fsdp::testing
