// A tensor, how it lies on a mesh, and a chain of views of it, drawn from a seed.
//
//   const RandomView view = draw_view(17);
//   std::cout << to_string(view);   // "view of seed 17: [6, 4] on mesh [2], Shard(0), ..."
#pragma once

#include "dtensor/placement.h"
#include "tests/dtensor/views/view_step.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::testing {

struct RandomView {
  uint64_t seed = 0;
  Sizes mesh = {};
  Sizes shape = {};
  Sizes memory_order = {};  // dimensions from the outermost in memory to the innermost
  std::vector<Placement> placements = {};
  std::vector<ViewStep> steps = {};
};

RandomView draw_view(uint64_t seed);
std::string to_string(const RandomView& view);

// The plain tensor that is viewed: whole numbers that all differ, in double.
at::Tensor viewed_tensor(const RandomView& view);

}  // namespace fsdp::testing
