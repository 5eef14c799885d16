// Fine-tuning with adapters (LoRA; Hu et al., "LoRA: Low-Rank Adaptation of Large
// Language Models", 2021): the model is frozen, and beside chosen layers W x two small
// matrices are trained, W x + alpha / rank * B (A x). An ordinary module: sharding knows
// nothing of it.
#pragma once

#include <c10/core/ScalarType.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <string>
#include <vector>

namespace programs {

struct LoraOptions {
  int64_t rank = 0;  // of the matrices; 0: no adapters
  double alpha = 16;
  std::vector<std::string> targets = {"query", "value"};  // names of layers, in every block
  c10::ScalarType frozen_dtype = c10::kBFloat16;          // adapters are float
  bool stores_nf4 = false;  // QLoRA: of its matrices this rank keeps codes of 4 bits
};

// A linear layer that may have an adapter.
class LoraLinearImpl : public torch::nn::LinearImpl {
 public:
  using LinearImpl::LinearImpl;
  torch::Tensor forward(const torch::Tensor& x);
  // B starts as 0, so that nothing changes at first.
  void adapt(int64_t rank, double alpha);

  torch::nn::Linear lora_A{nullptr}, lora_B{nullptr};  // [rank, in] and [out, rank]

 private:
  double scale_ = 0;
};
TORCH_MODULE(LoraLinear);

// Freezes all parameters of `model`, in frozen_dtype, and gives adapters to its layers.
// Nothing where rank is 0. Throws ValueError for a target that no layer is called.
void add_adapters(torch::nn::Module& model, const LoraOptions& options);

}  // namespace programs
