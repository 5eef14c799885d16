// A small decoder-like model: an embedding, blocks with a norm and two linear layers, a
// norm of its own and a head.
#pragma once

#include "tests/fully_shard/support/parity.h"

namespace fsdp::testing {

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", torch::nn::Linear(width, 2 * width))),
        down(register_module("down", torch::nn::Linear(2 * width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

struct DecoderImpl : torch::nn::Module {
  DecoderImpl(int64_t width, int64_t count)
      : embedding(register_module("embedding", torch::nn::Embedding(10, width))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        head(register_module("head", torch::nn::Linear(width, 10))) {
    for (int64_t i = 0; i < count; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block(width)));
    }
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    auto x = embedding(tokens);
    for (auto& block : blocks) x = block(x);
    return head(norm(x));
  }
  torch::nn::Embedding embedding;
  std::vector<Block> blocks;
  torch::nn::LayerNorm norm;
  torch::nn::Linear head;
};
TORCH_MODULE(Decoder);

inline torch::Tensor loss_of(Decoder& model, const Data& data) {
  return model(data.index).pow(2).mean();
}

inline Model decoder_model(int64_t width, int64_t count) {
  Decoder model(width, count);
  return {model.ptr(), [model](const Data& data) mutable { return loss_of(model, data); }};
}

// Embedding, each block, head and the root as units.
inline void shard_decoder_with(const FullyShardOptions& options, torch::nn::Module& module,
                               const DeviceMesh& mesh) {
  auto& model = dynamic_cast<DecoderImpl&>(module);
  fully_shard(model.embedding, mesh, options);
  for (auto& block : model.blocks) fully_shard(block, mesh, options);
  fully_shard(model.head, mesh, options);
  fully_shard(module, mesh, options);
}
inline void shard_decoder(torch::nn::Module& module, const DeviceMesh& mesh) {
  shard_decoder_with({}, module, mesh);
}

}  // namespace fsdp::testing
