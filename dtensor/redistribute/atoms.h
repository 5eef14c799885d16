// The atoms of an interleaved cut as a dimension of their own: along them it is a plain
// cut.
#pragma once

#include "dtensor/placement.h"

#include <cstdint>
#include <vector>

namespace fsdp::internal {

// With dimension cut.dim as blocks, atoms and elements of an atom.
std::vector<int64_t> split_shape(std::vector<int64_t> shape, const Shard& cut);

}  // namespace fsdp::internal
