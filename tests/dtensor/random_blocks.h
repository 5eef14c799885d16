// Interleaved cuts at random.
#pragma once

#include "dtensor/placement.h"

#include <cstdint>
#include <random>
#include <vector>

namespace fsdp::testing {

// `placements` of a tensor of `shape`, some of the cuts in blocks or of atoms: the first
// of a dimension, of which outer * unit is a divisor.
std::vector<Placement> with_random_blocks(std::vector<Placement> placements,
                                          const std::vector<int64_t>& shape, std::mt19937& random);

}  // namespace fsdp::testing
