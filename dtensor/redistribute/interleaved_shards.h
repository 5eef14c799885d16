// Interleaved shards (Shard with blocks, PyTorch's _StridedShard) as plain ones: the
// sharded dimension is viewed as three, and along the middle one the shards are
// contiguous.
#pragma once

#include "dtensor/placement.h"

#include <cstdint>
#include <vector>

namespace fsdp::internal {

// With dimension cut.dim as blocks, atoms and elements of an atom.
std::vector<int64_t> split_shape(std::vector<int64_t> shape, const Shard& cut);

}  // namespace fsdp::internal
