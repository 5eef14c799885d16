#pragma once

#include "fully_shard/transport/packed_layout.h"

#include <torch/torch.h>

#include <cstdint>
#include <vector>

namespace fsdp::testing {

// Bytes of a rank's row where `ranks` ranks share `parameters`.
inline int64_t row_bytes(const std::vector<torch::Tensor>& parameters, int64_t ranks) {
  std::vector<internal::ShardExtent> extents;
  for (const auto& parameter : parameters) {
    const auto bytes = static_cast<int64_t>(parameter.element_size()) * parameter.numel();
    extents.push_back({parameter.size(0), bytes / parameter.size(0)});
  }
  return internal::PackedLayout(extents, ranks).row_bytes();
}

inline int64_t row_bytes(const torch::nn::Module& module, int64_t ranks) {
  return row_bytes(module.parameters(), ranks);
}

}  // namespace fsdp::testing
