// A layer whose parameters are registry entries, the same layer unsharded, and values of
// each rank's own.
#pragma once

#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/support/parity.h"

#include <torch/torch.h>

#include <cstdint>
#include <memory>

namespace fsdp::testing {

// One row is on rank 0 alone; five are cut unevenly.
struct Layer : torch::nn::Module {
  Layer() {
    weight = register_parameter("weight", torch::randn({5, 16}) / 4);
    bias = register_parameter("bias", torch::randn({5}));
    scale = register_parameter("scale", torch::randn({1, 5}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return torch::linear(x, weight, bias) * scale; }
  torch::Tensor weight, bias, scale;
};

inline std::shared_ptr<Layer> layer() {
  std::shared_ptr<Layer> made;
  build_seeded([&] { return Model{made = std::make_shared<Layer>(), {}}; });
  return made;
}

inline std::shared_ptr<Layer> sharded_layer(const DeviceMesh& mesh) {
  auto made = layer();
  fully_shard(*made, mesh);
  return made;
}

inline torch::Tensor own_rows(int64_t rank) {
  return make_data(3 + static_cast<uint64_t>(rank)).x[0];
}

}  // namespace fsdp::testing
