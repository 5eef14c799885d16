// A decoder as one writes it, with dropout wherever one has it: the embedding, attention,
// hidden units, residual branches.
#pragma once

#include "tensor_parallel/parallel_plan.h"

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::testing {

inline constexpr double kDropped = 0.1;
inline constexpr int64_t kDropWidth = 20, kDropHeads = 5, kDropVocab = 33;

struct DroppingBlockImpl : torch::nn::Module {
  torch::nn::Linear query = linear("query", kDropWidth, kDropWidth);
  // A bias would have no gradient but rounding: softmax takes no notice of it.
  torch::nn::Linear key = register_module(
      "key", torch::nn::Linear(torch::nn::LinearOptions(kDropWidth, kDropWidth).bias(false)));
  torch::nn::Linear value = linear("value", kDropWidth, kDropWidth);
  torch::nn::Linear output = linear("output", kDropWidth, kDropWidth);
  torch::nn::Linear up = linear("up", kDropWidth, 26), down = linear("down", 26, kDropWidth);
  torch::nn::LayerNorm attention_norm = norm("attention_norm"), mlp_norm = norm("mlp_norm");
  torch::nn::Dropout drop = register_module("drop", torch::nn::Dropout(kDropped));

  torch::Tensor forward(torch::Tensor x) {
    x = x + drop(output(attend(attention_norm(x))));
    return x + drop(down(drop(torch::gelu(up(mlp_norm(x))))));
  }

 private:
  torch::nn::Linear linear(const std::string& name, int64_t in, int64_t out) {
    return register_module(name, torch::nn::Linear(in, out));
  }
  torch::nn::LayerNorm norm(const std::string& name) {
    return register_module(name, torch::nn::LayerNorm(torch::nn::LayerNormOptions({kDropWidth})));
  }
  static torch::Tensor heads(const torch::Tensor& x) {
    return x.view({x.size(0), x.size(1), kDropHeads, -1}).transpose(1, 2);
  }
  torch::Tensor attend(const torch::Tensor& x) {
    const auto mixed = torch::scaled_dot_product_attention(
        heads(query(x)), heads(key(x)), heads(value(x)), {}, is_training() ? kDropped : 0,
        /*is_causal=*/true);
    return mixed.transpose(1, 2).flatten(2);
  }
};
TORCH_MODULE(DroppingBlock);

struct DroppingTransformerImpl : torch::nn::Module {
  torch::nn::Embedding embedding =
      register_module("embedding", torch::nn::Embedding(kDropVocab, kDropWidth));
  DroppingBlock block0 = register_module("block0", DroppingBlock());
  DroppingBlock block1 = register_module("block1", DroppingBlock());
  torch::nn::LayerNorm norm =
      register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kDropWidth})));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(kDropWidth, kDropVocab));
  torch::nn::Dropout drop = register_module("drop", torch::nn::Dropout(kDropped));
  // How a block is run: by checkpoint, for instance.
  std::function<torch::Tensor(DroppingBlock&, const torch::Tensor&)> run =
      [](DroppingBlock& block, const torch::Tensor& x) { return block(x); };

  torch::Tensor forward(const torch::Tensor& tokens) {
    return head(norm(run(block1, run(block0, drop(embedding(tokens))))));
  }
};
TORCH_MODULE(DroppingTransformer);

inline ParallelPlan dropping_plan(bool cut_sequence) {
  std::optional<Placement> between;
  if (cut_sequence) between = Shard{1};
  const int64_t unit = kDropWidth / kDropHeads;
  ParallelPlan plan = {{"embedding", RowwiseParallel{.output_layout = between}},
                       {"block*.query", ColwiseParallel{.unit = unit}},
                       {"block*.key", ColwiseParallel{.unit = unit}},
                       {"block*.value", ColwiseParallel{.unit = unit}},
                       {"block*.output", RowwiseParallel{.output_layout = between, .unit = unit}},
                       {"block*.up", ColwiseParallel{}},
                       {"block*.down", RowwiseParallel{.output_layout = between}},
                       {"head", ColwiseParallel{}}};
  if (cut_sequence) {
    plan.emplace_back("*norm", SequenceParallel{});
    plan.emplace_back("block*.*norm", SequenceParallel{});
  }
  return plan;
}

}  // namespace fsdp::testing
