// Models whose parameters differ in what sharding meets, and how they are trained, for
// tests that combine policies.
#pragma once

#include "tests/support/head.h"
#include "tests/support/start_values.h"

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::testing {

enum class Parameters { kEven, kUneven, kFrozen, kTied, kUnused };
constexpr Parameters kAllParameters[] = {Parameters::kEven, Parameters::kUneven,
                                         Parameters::kFrozen, Parameters::kTied,
                                         Parameters::kUnused};

// Sizes that 1 to 4 ranks divide, but for kUneven, where even ranks without a row occur.
struct VariedBlockImpl : torch::nn::Module {
  VariedBlockImpl(int64_t width, bool has_unused)
      : up(register_module("up", make_linear(width, 2 * width))),
        down(register_module("down", make_linear(2 * width, width))) {
    if (has_unused) unused = register_module("unused", make_linear(width, width));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::tanh(up(x))); }
  torch::nn::Linear up, down, unused{nullptr};
};
TORCH_MODULE(VariedBlock);

struct VariedModelImpl : torch::nn::Module {
  VariedModelImpl(Parameters kind, int64_t depth)
      : rows(kind == Parameters::kUneven ? 3 : 12), width(kind == Parameters::kUneven ? 5 : 12) {
    embedding = register_module("embedding", torch::nn::Embedding(rows, width));
    for (int64_t i = 0; i < depth; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i),
                                       VariedBlock(width, kind == Parameters::kUnused)));
    }
    const auto own = torch::empty({rows, width});
    head = register_module("head", Head(kind == Parameters::kTied ? embedding->weight : own));
    set_start_values(*this);
    to(torch::kDouble);
    if (kind == Parameters::kFrozen) blocks[0]->up->weight.set_requires_grad(false);
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    auto x = embedding(tokens);
    for (auto& block : blocks) x = block(x);
    return head(x);
  }

  int64_t rows, width;
  torch::nn::Embedding embedding{nullptr};
  std::vector<VariedBlock> blocks;
  Head head{nullptr};
};
TORCH_MODULE(VariedModel);

}  // namespace fsdp::testing
