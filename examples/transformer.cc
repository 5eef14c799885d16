#include "examples/transformer.h"

#include <algorithm>
#include <string>
#include <tuple>

namespace examples {
namespace {

constexpr double kNormEpsilon = 1e-5;
constexpr double kRotaryBase = 10000.0;
constexpr double kInitialDeviation = 0.02;

torch::nn::Linear linear(int64_t in, int64_t out) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
}

// The hidden width that gives SwiGLU's three matrices about the size of a classic block's
// two, in multiples of 16.
int64_t swiglu_width(int64_t width) { return (width * 8 / 3 + 15) / 16 * 16; }

// Rotates the pairs (x[i], x[i + half]) of every head by an angle that grows with the
// position. x: [batch, heads, tokens, head width].
torch::Tensor rotate(const torch::Tensor& x, const torch::Tensor& cos, const torch::Tensor& sin) {
  auto halves = x.chunk(2, -1);
  return torch::cat({halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin}, -1)
      .to(x.scalar_type());  // the angles are float, whatever is computed in
}

void check(const TransformerConfig& config) {
  TORCH_CHECK_VALUE(config.heads > 0 && config.width % (2 * config.heads) == 0,
                    "width must be a multiple of 2 * heads = ", 2 * config.heads, ", got ",
                    config.width);
  TORCH_CHECK_VALUE(config.kv_heads > 0 && config.heads % config.kv_heads == 0,
                    "kv_heads must divide heads = ", config.heads, ", got ", config.kv_heads);
  TORCH_CHECK_VALUE(config.vocab > 0 && config.blocks > 0 && config.max_tokens > 0,
                    "vocab, blocks and max_tokens must be positive, got ", config.vocab, ", ",
                    config.blocks, " and ", config.max_tokens);
}

}  // namespace

RmsNormImpl::RmsNormImpl(int64_t width)
    : weight(register_parameter("weight", torch::ones({width}))) {}

torch::Tensor RmsNormImpl::forward(const torch::Tensor& x) {
  return torch::rms_norm(x, weight.sizes(), weight, kNormEpsilon);
}

AttentionImpl::AttentionImpl(const TransformerConfig& config)
    : heads_(config.heads), kv_heads_(config.kv_heads) {
  const int64_t kv_width = config.width / heads_ * kv_heads_;
  query = register_module("query", linear(config.width, config.width));
  key = register_module("key", linear(config.width, kv_width));
  value = register_module("value", linear(config.width, kv_width));
  output = register_module("output", linear(config.width, config.width));
}

torch::Tensor AttentionImpl::forward(const torch::Tensor& x, const torch::Tensor& cos,
                                     const torch::Tensor& sin) {
  const int64_t batch = x.size(0), tokens = x.size(1), width = x.size(2),
                head_width = width / heads_;
  auto split = [&](const torch::Tensor& y, int64_t heads) {
    return y.view({batch, tokens, heads, head_width}).transpose(1, 2);
  };
  auto share = [&](const torch::Tensor& y) { return y.repeat_interleave(heads_ / kv_heads_, 1); };
  auto q = rotate(split(query(x), heads_), cos, sin);
  auto k = share(rotate(split(key(x), kv_heads_), cos, sin));
  auto v = share(split(value(x), kv_heads_));
  auto mixed = torch::scaled_dot_product_attention(q, k, v, /*attn_mask=*/{}, /*dropout_p=*/0.0,
                                                   /*is_causal=*/true);
  return output(mixed.transpose(1, 2).reshape({batch, tokens, width}));
}

SwiGluImpl::SwiGluImpl(int64_t width) {
  gate = register_module("gate", linear(width, swiglu_width(width)));
  up = register_module("up", linear(width, swiglu_width(width)));
  down = register_module("down", linear(swiglu_width(width), width));
}

torch::Tensor SwiGluImpl::forward(const torch::Tensor& x) {
  return down(torch::silu(gate(x)) * up(x));
}

BlockImpl::BlockImpl(const TransformerConfig& config) {
  attention_norm = register_module("attention_norm", RmsNorm(config.width));
  attention = register_module("attention", Attention(config));
  mlp_norm = register_module("mlp_norm", RmsNorm(config.width));
  mlp = register_module("mlp", SwiGlu(config.width));
}

torch::Tensor BlockImpl::forward(torch::Tensor x, const torch::Tensor& cos,
                                 const torch::Tensor& sin) {
  x = x + attention(attention_norm(x), cos, sin);
  return x + mlp(mlp_norm(x));
}

TransformerImpl::TransformerImpl(const TransformerConfig& config) : config_(config) {
  check(config);
  embedding = register_module("embedding", torch::nn::Embedding(config.vocab, config.width));
  for (int64_t i = 0; i < config.blocks; ++i) {
    blocks.push_back(register_module("block" + std::to_string(i), Block(config)));
  }
  norm = register_module("norm", RmsNorm(config.width));
  head = register_module("head", linear(config.width, config.vocab));

  const int64_t head_width = config.width / config.heads;
  auto frequency = torch::pow(
      kRotaryBase, torch::arange(0, head_width, 2, torch::kFloat64) / -double(head_width));
  auto angle = torch::outer(torch::arange(config.max_tokens, torch::kFloat64), frequency);
  cos_ = register_buffer("cos", angle.cos().to(torch::kFloat32));
  sin_ = register_buffer("sin", angle.sin().to(torch::kFloat32));

  torch::NoGradGuard no_grad;
  for (auto& parameter : parameters()) {
    if (parameter.dim() > 1) parameter.normal_(0.0, kInitialDeviation);
  }
}

torch::Tensor TransformerImpl::forward(const torch::Tensor& tokens) {
  TORCH_CHECK_VALUE(tokens.dim() == 2 && tokens.size(1) <= config_.max_tokens,
                    "tokens must be [batch, <= ", config_.max_tokens, "], got ", tokens.sizes());
  auto cos = cos_.narrow(0, 0, tokens.size(1)), sin = sin_.narrow(0, 0, tokens.size(1));
  auto x = embedding(tokens);
  for (auto& block : blocks) {
    const Run run = [&block, cos, sin](const torch::Tensor& input) {
      return block->forward(input, cos, sin);
    };
    x = around_block ? around_block(run, x) : run(x);
  }
  return head(norm(x));
}

torch::Tensor TransformerImpl::generate(const torch::Tensor& prompt, int64_t n,
                                        double temperature) {
  TORCH_CHECK_VALUE(prompt.dim() == 1 && prompt.size(0) > 0,
                    "prompt must be a non-empty [tokens], got ", prompt.sizes());
  torch::NoGradGuard no_grad;
  auto text = prompt;
  for (int64_t i = 0; i < n; ++i) {
    auto window = text.narrow(0, std::max<int64_t>(0, text.size(0) - config_.max_tokens),
                              std::min(text.size(0), config_.max_tokens));
    auto logits = forward(window.unsqueeze(0)).select(0, 0).select(0, -1);
    auto next = temperature > 0 ? torch::multinomial(torch::softmax(logits / temperature, -1), 1)
                                : logits.argmax().unsqueeze(0);
    text = torch::cat({text, next});
  }
  return text;
}

torch::Tensor next_token_loss(const torch::Tensor& logits, const torch::Tensor& targets) {
  return torch::cross_entropy_loss(logits.flatten(0, 1).to(torch::kFloat), targets.flatten());
}

}  // namespace examples
