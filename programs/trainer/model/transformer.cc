#include "programs/trainer/model/transformer.h"

#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>
#include <tuple>

namespace programs {
namespace {

constexpr double kInitialDeviation = 0.02;

LoraLinear linear(int64_t in, int64_t out, bool bias = false) {
  return LoraLinear(torch::nn::LinearOptions(in, out).bias(bias));
}

// The hidden width that gives SwiGLU's three matrices about the size of a classic block's
// two, in multiples of 16.
int64_t swiglu_width(int64_t width) { return (width * 8 / 3 + 15) / 16 * 16; }

// Rotates the pairs (x[i], x[i + half]) of every head by an angle that grows with the
// position. x: [batch, heads, tokens, head width].
torch::Tensor rotate(const torch::Tensor& x, const Rotation& rotation) {
  const auto& [cos, sin] = rotation;
  auto halves = x.chunk(2, -1);
  return torch::cat({halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin}, -1)
      .to(x.scalar_type());  // the angles are float, whatever is computed in
}

double scaled(double frequency, const RotaryScaling& scaling) {
  const double wavelengths =
      static_cast<double>(scaling.original_max_tokens) * frequency / (2 * std::numbers::pi);
  const double kept =
      std::clamp((wavelengths - scaling.low) / (scaling.high - scaling.low), 0.0, 1.0);
  return frequency * (kept + (1 - kept) / scaling.factor);
}

// Angles per token, of each pair: double [head width / 2].
torch::Tensor frequencies(const TransformerConfig& config) {
  std::vector<double> values;
  for (int64_t i = 0; i < config.head_width; i += 2) {
    const double frequency =
        std::pow(config.rotary_base, -static_cast<double>(i) / double(config.head_width));
    values.push_back(config.rotary_scaling ? scaled(frequency, *config.rotary_scaling) : frequency);
  }
  return torch::tensor(values, torch::kFloat64);
}

// Of each token's own position. positions: [batch, tokens].
Rotation at_positions(const Rotation& rotation, const torch::Tensor& positions) {
  const auto of_tokens = [&](const torch::Tensor& all) {
    return all.index({positions}).unsqueeze(1);
  };
  return {of_tokens(rotation.cos), of_tokens(rotation.sin)};
}

void check_length(const torch::Tensor& tokens, int64_t most) {
  TORCH_CHECK_VALUE(tokens.dim() == 2 && tokens.size(1) <= most, "tokens must be [batch, <= ", most,
                    "], got ", tokens.sizes());
}

}  // namespace

TransformerConfig checked(TransformerConfig config) {
  TORCH_CHECK_VALUE(config.vocab > 0 && config.blocks > 0 && config.max_tokens > 0,
                    "vocab, blocks and max_tokens must be positive, got ", config.vocab, ", ",
                    config.blocks, " and ", config.max_tokens);
  TORCH_CHECK_VALUE(
      config.heads > 0 && (config.head_width > 0 || config.width % (2 * config.heads) == 0),
      "width must be a multiple of 2 * heads = ", 2 * config.heads, ", got ", config.width);
  if (config.head_width == 0) config.head_width = config.width / config.heads;
  TORCH_CHECK_VALUE(config.head_width % 2 == 0, "head_width must be even, got ", config.head_width);
  TORCH_CHECK_VALUE(config.kv_heads > 0 && config.heads % config.kv_heads == 0,
                    "kv_heads must divide heads = ", config.heads, ", got ", config.kv_heads);
  if (config.mlp_width == 0) config.mlp_width = swiglu_width(config.width);
  auto& mixture = config.mixture;
  if (mixture.hidden == 0) mixture.hidden = config.mlp_width;
  TORCH_CHECK_VALUE(
      mixture.experts >= 0 &&
          (mixture.experts == 0 || (mixture.per_token > 0 && mixture.per_token <= mixture.experts)),
      "of ", mixture.experts, " experts each token has ", mixture.per_token,
      "; allowed are 1 to the number of experts");
  return config;
}

RmsNormImpl::RmsNormImpl(int64_t width, double epsilon)
    : weight(register_parameter("weight", torch::ones({width}))), epsilon_(epsilon) {}

torch::Tensor RmsNormImpl::forward(const torch::Tensor& x) {
  return torch::rms_norm(x, weight.sizes(), weight, epsilon_);
}

AttentionImpl::AttentionImpl(const TransformerConfig& config)
    : heads_(config.heads), kv_heads_(config.kv_heads), head_width_(config.head_width) {
  const int64_t width = heads_ * head_width_, kv_width = kv_heads_ * head_width_;
  query = register_module("query", linear(config.width, width, config.qkv_bias));
  key = register_module("key", linear(config.width, kv_width, config.qkv_bias));
  value = register_module("value", linear(config.width, kv_width, config.qkv_bias));
  output = register_module("output", linear(width, config.width));
  if (!config.qk_norm) return;
  query_norm = register_module("query_norm", RmsNorm(head_width_, config.norm_epsilon));
  key_norm = register_module("key_norm", RmsNorm(head_width_, config.norm_epsilon));
}

torch::Tensor AttentionImpl::forward(const torch::Tensor& x, const Rotation& rotation,
                                     KeysAndValues* past, const torch::Tensor& mask) {
  const int64_t batch = x.size(0), tokens = x.size(1);
  auto split = [&](const torch::Tensor& y, int64_t heads) {
    return y.view({batch, tokens, heads, head_width_}).transpose(1, 2);
  };
  auto share = [&](const torch::Tensor& y) { return y.repeat_interleave(heads_ / kv_heads_, 1); };
  const auto normed = [](RmsNorm& norm, const torch::Tensor& y) { return norm ? norm(y) : y; };
  auto q = rotate(normed(query_norm, split(query(x), heads_)), rotation);
  auto k = rotate(normed(key_norm, split(key(x), kv_heads_)), rotation);
  auto v = split(value(x), kv_heads_);
  const bool is_first = past == nullptr || !past->keys.defined();
  if (!is_first) {
    k = torch::cat({past->keys, k}, 2);
    v = torch::cat({past->values, v}, 2);
  }
  if (past != nullptr) *past = {k, v};
  auto mixed = torch::scaled_dot_product_attention(
      q, share(k), share(v), mask.defined() ? std::optional(mask) : std::nullopt,
      /*dropout_p=*/0.0, /*is_causal=*/is_first && !mask.defined());
  return output(mixed.transpose(1, 2).reshape({batch, tokens, heads_ * head_width_}));
}

SwiGluImpl::SwiGluImpl(int64_t width, int64_t mlp_width) {
  gate = register_module("gate", linear(width, mlp_width));
  up = register_module("up", linear(width, mlp_width));
  down = register_module("down", linear(mlp_width, width));
}

torch::Tensor SwiGluImpl::forward(const torch::Tensor& x) {
  return down(torch::silu(gate(x)) * up(x));
}

BlockImpl::BlockImpl(const TransformerConfig& given) {
  const auto config = checked(given);
  attention_norm = register_module("attention_norm", RmsNorm(config.width, config.norm_epsilon));
  attention = register_module("attention", Attention(config));
  mlp_norm = register_module("mlp_norm", RmsNorm(config.width, config.norm_epsilon));
  if (config.mixture.experts > 0) {
    mixture = register_module("mlp", Mixture(config.mixture, config.width));
  } else {
    mlp = register_module("mlp", SwiGlu(config.width, config.mlp_width));
  }
}

torch::Tensor BlockImpl::forward(torch::Tensor x, const Rotation& rotation, KeysAndValues* past,
                                 const torch::Tensor& mask) {
  x = x + attention(attention_norm(x), rotation, past, mask);
  const auto normed = mlp_norm(x);
  return x + (mixture ? mixture(normed) : mlp(normed));
}

TransformerImpl::TransformerImpl(const TransformerConfig& config) : config_(checked(config)) {
  embedding = register_module("embedding", torch::nn::Embedding(config_.vocab, config_.width));
  for (int64_t i = 0; i < config_.blocks; ++i) {
    blocks.push_back(register_module("block" + std::to_string(i), Block(config_)));
  }
  norm = register_module("norm", RmsNorm(config_.width, config_.norm_epsilon));
  if (!config_.tied_head)
    head = register_module(
        "head",
        torch::nn::Linear(torch::nn::LinearOptions(config_.width, config_.vocab).bias(false)));

  torch::NoGradGuard no_grad;
  for (auto& item : named_parameters()) {
    if (item.value().dim() > 1) item.value().normal_(0.0, kInitialDeviation);
    if (item.key().ends_with(".bias")) item.value().zero_();
  }
}

torch::Tensor TransformerImpl::forward(const torch::Tensor& tokens,
                                       const std::optional<Documents>& documents) {
  check_length(tokens, config_.max_tokens);
  const auto angles = rotation(0, tokens.size(1), tokens.device());
  return documents
             ? compute(tokens, at_positions(angles, documents->positions), nullptr, documents->mask)
             : compute(tokens, angles, nullptr, {});
}

Rotation TransformerImpl::rotation(int64_t first, int64_t tokens, c10::Device device) {
  const int64_t known = all_.cos.defined() && all_.cos.device() == device ? all_.cos.size(0) : 0;
  if (known < first + tokens) {
    const c10::InferenceMode for_training_too(false);
    const auto count = std::min(config_.max_tokens, std::max(first + tokens, 2 * known));
    const auto angle = torch::outer(torch::arange(count, torch::kFloat64), frequencies(config_));
    all_ = {angle.cos().to(torch::kFloat32).to(device), angle.sin().to(torch::kFloat32).to(device)};
  }
  return {all_.cos.narrow(0, first, tokens), all_.sin.narrow(0, first, tokens)};
}

torch::Tensor TransformerImpl::compute(const torch::Tensor& tokens, const Rotation& angles,
                                       std::vector<KeysAndValues>* past,
                                       const torch::Tensor& mask) {
  auto x = embedding(tokens);
  for (size_t i = 0; i < blocks.size(); ++i) {
    auto* const past_of_block = past == nullptr ? nullptr : &(*past)[i];
    const Run run = [block = blocks[i], angles, past_of_block,
                     mask](const torch::Tensor& input) mutable {
      return block->forward(input, angles, past_of_block, mask);
    };
    x = around_block ? around_block(run, x) : run(x);
  }
  x = norm(x);
  return head ? head(x) : torch::linear(x, embedding->weight);
}

torch::Tensor TransformerImpl::generate(const torch::Tensor& prompt, int64_t n,
                                        double temperature) {
  TORCH_CHECK_VALUE(prompt.dim() == 1 && prompt.size(0) > 0,
                    "prompt must be a non-empty [tokens], got ", prompt.sizes());
  torch::NoGradGuard no_grad;
  std::vector<KeysAndValues> past;
  auto text = prompt;
  for (int64_t i = 0; i < n; ++i) {
    const bool is_full = !past.empty() && past.front().keys.size(2) == config_.max_tokens;
    int64_t given = 1;
    if (past.empty() || is_full) {
      past.assign(blocks.size(), {});
      const auto most = is_full ? (config_.max_tokens + 1) / 2 : config_.max_tokens;
      given = std::min(text.size(0), most);
    }
    const int64_t before = past.front().keys.defined() ? past.front().keys.size(2) : 0;
    auto logits = compute(text.narrow(0, text.size(0) - given, given).unsqueeze(0),
                          rotation(before, given, text.device()), &past, /*mask=*/{})
                      .select(0, 0)
                      .select(0, -1);
    auto next = temperature > 0 ? torch::multinomial(torch::softmax(logits / temperature, -1), 1)
                                : logits.argmax().unsqueeze(0);
    text = torch::cat({text, next});
  }
  return text;
}

torch::Tensor next_token_loss(const torch::Tensor& logits, const torch::Tensor& targets) {
  return torch::cross_entropy_loss(logits.flatten(0, 1).to(torch::kFloat), targets.flatten());
}

torch::Tensor next_token_loss(const torch::Tensor& logits, const torch::Tensor& targets,
                              double count) {
  return torch::cross_entropy_loss(logits.flatten(0, 1).to(torch::kFloat), targets.flatten(),
                                   /*weight=*/{}, at::Reduction::Sum, kNoTarget) /
         count;
}

}  // namespace programs
