#pragma once

#include "fully_shard/fully_shard.h"
#include "tests/support/start_values.h"

#include <torch/torch.h>

#include <cstdint>

namespace fsdp::testing {

// Two layers with a tanh between them.
struct PairImpl : torch::nn::Module {
  explicit PairImpl(int64_t in = 4, int64_t hidden = 4, int64_t out = 4)
      : first(register_module("first", make_linear(in, hidden))),
        second(register_module("second", make_linear(hidden, out))) {}
  torch::Tensor forward(const torch::Tensor& x) { return second(torch::tanh(first(x))); }
  torch::nn::Linear first, second;
};
TORCH_MODULE(Pair);

// Both layers and the root as units.
inline Pair sharded(Pair model, const DeviceMesh& mesh, const FullyShardOptions& options = {}) {
  fully_shard(model->first, mesh, options);
  fully_shard(model->second, mesh, options);
  fully_shard(model, mesh, options);
  return model;
}

}  // namespace fsdp::testing
