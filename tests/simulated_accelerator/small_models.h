// Models and training steps for tests of the device itself, on CPU and on the device.
#pragma once

#include <torch/nn.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace fsdp::testing::simulated {

// Layers without anything random.
struct PlainMlp : torch::nn::Module {
  PlainMlp();
  at::Tensor forward(const at::Tensor& x);

  torch::nn::Linear first, second, last;
};

// An embedding, a normalization, dropout, and a layer that is used twice: the second time
// on a stream of its own where there is one, with the waits and record_stream() that
// needs.
struct TokenModel : torch::nn::Module {
  TokenModel();
  at::Tensor forward(const at::Tensor& tokens);
  at::Tensor second_use(const at::Tensor& x);

  torch::nn::Embedding embedding;
  torch::nn::Linear first;
  torch::nn::LayerNorm norm;
  torch::nn::Dropout dropout;
  torch::nn::Linear twice, last;
  std::optional<c10::Stream> second_stream;
};

inline constexpr int kSteps = 4;

// Losses of each step, then the parameters, on CPU. Initial values and draws are the same
// each time. `after_step` is called with the step's number.
using Results = std::vector<at::Tensor>;
using AfterStep = std::function<void(int)>;
Results train_plain_mlp(c10::Device device, const AfterStep& after_step);
Results train_token_model(c10::Device device, std::optional<c10::Stream> second_stream,
                          const AfterStep& after_step);

}  // namespace fsdp::testing::simulated
