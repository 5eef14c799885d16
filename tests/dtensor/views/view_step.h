// One operator that makes a view, with its arguments, drawn at random for a tensor.
#pragma once

#include "dtensor/placement.h"
#include "tests/support/draws.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fsdp::testing {

using Sizes = std::vector<int64_t>;

struct ViewStep {
  std::string text;  // "view([2, 3])"
  std::function<at::Tensor(const at::Tensor&)> apply;
  // Whether the ranks of one mesh dimension, over which a tensor [shape] is cut so, can
  // each view what they have.
  std::function<bool(const Sizes& shape, const Shard& cut, int64_t ranks)> stays_local;
};

// Fits `plain`, and makes no tensor of more than kMostElements elements or kMostDims
// dimensions.
inline constexpr int64_t kMostElements = 256, kMostDims = 5;
ViewStep draw_step(Draws& draws, const at::Tensor& plain);

int64_t draw_divisor(Draws& draws, int64_t number);

}  // namespace fsdp::testing
