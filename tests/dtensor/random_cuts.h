// Interleaved and ragged cuts at random.
#pragma once

#include "dtensor/placement.h"

#include <cstdint>
#include <random>
#include <vector>

namespace fsdp::testing {

// `placements` of a tensor of `shape` on a mesh, some of the cuts in blocks, of atoms, or
// in parts of any sizes: the first of a dimension, which can be cut so.
std::vector<Placement> with_random_cuts(std::vector<Placement> placements,
                                        const std::vector<int64_t>& shape,
                                        const std::vector<int64_t>& mesh_shape,
                                        std::mt19937& random);

}  // namespace fsdp::testing
