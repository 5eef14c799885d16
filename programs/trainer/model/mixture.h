// A mixture of experts, which a block may have in the place of one SwiGLU (Mixtral,
// Qwen3-MoE): a router chooses a few of many for each token, and the token gets the sum
// of what these give, by the router's weights.
#pragma once

#include "device_mesh/device_mesh.h"

#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>

namespace programs {

struct MixtureConfig {
  int64_t experts = 0;      // of each block; 0: one SwiGLU
  int64_t per_token = 2;    // chosen ones
  int64_t hidden = 0;       // width within an expert; 0: the block's mlp_width
  bool sums_to_one = true;  // the weights of the chosen ones
};

// SwiGLUs, the weights of all in one tensor each: [experts, out, in].
class ExpertsImpl : public torch::nn::Module {
 public:
  ExpertsImpl(int64_t count, int64_t width, int64_t hidden);
  // rows: [n, width], those of the first expert, then of the next; counts: int64
  // [experts], how many each has.
  torch::Tensor forward(const torch::Tensor& rows, const torch::Tensor& counts);

  torch::Tensor gate, up, down;
};
TORCH_MODULE(Experts);

class MixtureImpl : public torch::nn::Module {
 public:
  MixtureImpl(const MixtureConfig& config, int64_t width);
  // x: [batch, tokens, width].
  torch::Tensor forward(const torch::Tensor& x);

  torch::nn::Linear router{nullptr};
  Experts experts{nullptr};
  // Over whose ranks the experts are cut, and tokens go to them; null: all are here.
  std::optional<fsdp::DeviceMesh> mesh;

 private:
  MixtureConfig config_;
};
TORCH_MODULE(Mixture);

}  // namespace programs
