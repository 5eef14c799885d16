// A Llama-class decoder: RMSNorm, rotary position embeddings, grouped-query attention,
// SwiGLU, untied head.
//
// Ordinary LibTorch code: it knows nothing of sharding, and trains sharded all the same
// (train_transformer.cc).
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace examples {

struct TransformerConfig {
  int64_t vocab = 256;
  int64_t width = 128;  // of the residual stream; a multiple of 2 * heads
  int64_t blocks = 4;
  int64_t heads = 4;
  int64_t kv_heads = 2;      // divides heads
  int64_t max_tokens = 128;  // longest sequence
};

class RmsNormImpl : public torch::nn::Module {
 public:
  explicit RmsNormImpl(int64_t width);
  torch::Tensor forward(const torch::Tensor& x);

  torch::Tensor weight;
};
TORCH_MODULE(RmsNorm);

// Causal attention in which heads / kv_heads query heads share one key and value head.
class AttentionImpl : public torch::nn::Module {
 public:
  explicit AttentionImpl(const TransformerConfig& config);
  // x: [batch, tokens, width]; cos, sin: [tokens, head width / 2].
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& cos, const torch::Tensor& sin);

  torch::nn::Linear query{nullptr}, key{nullptr}, value{nullptr}, output{nullptr};

 private:
  int64_t heads_, kv_heads_;
};
TORCH_MODULE(Attention);

// down(silu(gate(x)) * up(x))
class SwiGluImpl : public torch::nn::Module {
 public:
  explicit SwiGluImpl(int64_t width);
  torch::Tensor forward(const torch::Tensor& x);

  torch::nn::Linear gate{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(SwiGlu);

class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const TransformerConfig& config);
  torch::Tensor forward(torch::Tensor x, const torch::Tensor& cos, const torch::Tensor& sin);

  RmsNorm attention_norm{nullptr}, mlp_norm{nullptr};
  Attention attention{nullptr};
  SwiGlu mlp{nullptr};
};
TORCH_MODULE(Block);

class TransformerImpl : public torch::nn::Module {
 public:
  // Draws the initial weights from the default generator: the same seed gives the same
  // model.
  explicit TransformerImpl(const TransformerConfig& config);

  // tokens: int64 [batch, tokens] with tokens <= max_tokens. Returns logits [batch,
  // tokens, vocab].
  torch::Tensor forward(const torch::Tensor& tokens);

  // Continues `prompt` (int64 [tokens], not empty) by n tokens and returns all of them,
  // int64 [tokens + n]. Temperature 0 takes the likeliest token, otherwise tokens are
  // drawn from the default generator. Records no graph.
  torch::Tensor generate(const torch::Tensor& prompt, int64_t n, double temperature);

  // What forward does with each block and its input, if not run(input): to compute it
  // again in backward, for instance.
  using Run = std::function<torch::Tensor(const torch::Tensor& input)>;
  std::function<torch::Tensor(const Run& run, const torch::Tensor& input)> around_block;

  torch::nn::Embedding embedding{nullptr};
  std::vector<Block> blocks;
  RmsNorm norm{nullptr};
  torch::nn::Linear head{nullptr};

 private:
  TransformerConfig config_;
  torch::Tensor cos_, sin_;  // buffers [max_tokens, head width / 2]
};
TORCH_MODULE(Transformer);

// Mean cross entropy, in nats per token, of logits [batch, tokens, vocab] against targets
// int64 [batch, tokens].
torch::Tensor next_token_loss(const torch::Tensor& logits, const torch::Tensor& targets);

}  // namespace examples
