// A Llama-class decoder: RMSNorm, rotary position embeddings, grouped-query attention,
// SwiGLU. With the fields of TransformerConfig it is Llama 2 and 3, Mistral, Qwen2 and
// what else has these blocks (hugging_face.h).
//
// Ordinary LibTorch code: it knows nothing of sharding, and trains sharded all the same
// (train_transformer.cc).
#pragma once

#include "programs/trainer/model/documents.h"
#include "programs/trainer/model/lora.h"
#include "programs/trainer/model/mixture.h"

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace programs {

// Slower rotations for texts longer than those of the first training, as Llama 3.1 has
// them: frequencies of more than original_max_tokens / low wavelengths are divided by
// factor, those of fewer than original_max_tokens / high are kept, and what lies between
// is interpolated.
struct RotaryScaling {
  double factor = 8;
  double low = 1, high = 4;
  int64_t original_max_tokens = 8192;
};

struct TransformerConfig {
  int64_t vocab = 256;
  int64_t width = 128;  // of the residual stream; a multiple of 2 * heads, unless head_width is set
  int64_t blocks = 4;
  int64_t heads = 4;
  int64_t kv_heads = 2;      // divides heads
  int64_t max_tokens = 128;  // longest sequence
  int64_t head_width = 0;    // even; 0: width / heads
  int64_t mlp_width = 0;     // 0: so that the mlp's three matrices are about 8 width^2
  bool qkv_bias = false;     // biases on query, key and value, as Qwen2 has
  bool qk_norm = false;      // norms of the heads of query and key, as Qwen3 has
  MixtureConfig mixture = {};
  bool tied_head = false;  // the embedding's table is the head's matrix, too
  double norm_epsilon = 1e-5;
  double rotary_base = 10000;
  std::optional<RotaryScaling> rotary_scaling = {};
};

// With the fields that are 0 filled in. Throws ValueError for what cannot be.
TransformerConfig checked(TransformerConfig config);

// Of the positions of a sequence: [tokens, head width / 2], float; where the sequences of
// a batch have positions of their own: [batch, 1, tokens, head width / 2].
struct Rotation {
  torch::Tensor cos, sin;
};

// Of the tokens before, which are not computed again: [batch, kv_heads, tokens, head
// width]; undefined at the start.
struct KeysAndValues {
  torch::Tensor keys, values;
};

class RmsNormImpl : public torch::nn::Module {
 public:
  RmsNormImpl(int64_t width, double epsilon);
  torch::Tensor forward(const torch::Tensor& x);

  torch::Tensor weight;

 private:
  double epsilon_;
};
TORCH_MODULE(RmsNorm);

// Causal attention in which heads / kv_heads query heads share one key and value head.
class AttentionImpl : public torch::nn::Module {
 public:
  explicit AttentionImpl(const TransformerConfig& config);
  // x: [batch, tokens, width]. past: null, or of this block; takes in what is new. One
  // token at a time, once there are any. mask: of Documents, without a past; undefined:
  // tokens attend to all before.
  torch::Tensor forward(const torch::Tensor& x, const Rotation& rotation,
                        KeysAndValues* past = nullptr, const torch::Tensor& mask = {});

  LoraLinear query{nullptr}, key{nullptr}, value{nullptr}, output{nullptr};
  RmsNorm query_norm{nullptr}, key_norm{nullptr};  // null without qk_norm

 private:
  int64_t heads_, kv_heads_, head_width_;
};
TORCH_MODULE(Attention);

// down(silu(gate(x)) * up(x))
class SwiGluImpl : public torch::nn::Module {
 public:
  SwiGluImpl(int64_t width, int64_t mlp_width);
  torch::Tensor forward(const torch::Tensor& x);

  LoraLinear gate{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(SwiGlu);

class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const TransformerConfig& config);
  torch::Tensor forward(torch::Tensor x, const Rotation& rotation, KeysAndValues* past = nullptr,
                        const torch::Tensor& mask = {});

  RmsNorm attention_norm{nullptr}, mlp_norm{nullptr};
  Attention attention{nullptr};
  SwiGlu mlp{nullptr};  // one of the two, which is called "mlp" in both cases
  Mixture mixture{nullptr};
};
TORCH_MODULE(Block);

class TransformerImpl : public torch::nn::Module {
 public:
  // Draws the initial weights from the default generator: the same seed gives the same
  // model.
  explicit TransformerImpl(const TransformerConfig& config);

  // tokens: int64 [batch, tokens] with tokens <= max_tokens; documents: of these tokens,
  // on their device, or none: each sequence is one. Returns logits [batch, tokens,
  // vocab].
  torch::Tensor forward(const torch::Tensor& tokens,
                        const std::optional<Documents>& documents = {});

  // Continues `prompt` (int64 [tokens], not empty) by n tokens and returns all of them,
  // int64 [tokens + n]. Temperature 0 takes the likeliest token, otherwise tokens are
  // drawn from the default generator. Records no graph. Where max_tokens are reached it
  // goes on from the last half of them.
  torch::Tensor generate(const torch::Tensor& prompt, int64_t n, double temperature);

  // What forward does with each block and its input, if not run(input): to compute it
  // again in backward, for instance.
  using Run = std::function<torch::Tensor(const torch::Tensor& input)>;
  std::function<torch::Tensor(const Run& run, const torch::Tensor& input)> around_block;

  // What forward gives to its blocks for positions first ... first + tokens. A plain
  // tensor that is kept, and no buffer.
  Rotation rotation(int64_t first, int64_t tokens, c10::Device device);

  torch::nn::Embedding embedding{nullptr};
  std::vector<Block> blocks;
  RmsNorm norm{nullptr};
  torch::nn::Linear head{nullptr};  // null where it is tied

 private:
  // past: null, or of each block. mask: as the blocks take it.
  torch::Tensor compute(const torch::Tensor& tokens, const Rotation& angles,
                        std::vector<KeysAndValues>* past, const torch::Tensor& mask);

  TransformerConfig config_;
  Rotation all_;  // of as many positions as were asked for
};
TORCH_MODULE(Transformer);

// Mean cross entropy, in nats per token, of logits [batch, tokens, vocab] against targets
// int64 [batch, tokens].
torch::Tensor next_token_loss(const torch::Tensor& logits, const torch::Tensor& targets);

// The sum over the targets that are not kNoTarget, by `count`.
torch::Tensor next_token_loss(const torch::Tensor& logits, const torch::Tensor& targets,
                              double count);
constexpr int64_t kNoTarget = -100;  // what LibTorch's losses leave out

}  // namespace programs
