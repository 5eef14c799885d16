// Which views the ranks can make of what they have, by trying every cut.
#pragma once

#include "dtensor/placement.h"

#include <cstdint>
#include <vector>

namespace fsdp::testing {

// Whether some cut of a tensor [after] gives every rank the elements, in row-major order,
// that `cut` gives it of a tensor [before] of as many.
bool some_cut_keeps(const std::vector<int64_t>& before, const Shard& cut,
                    const std::vector<int64_t>& after, int64_t ranks);

// Whether elements [start, start + length) of a dimension of `size` elements are whole
// blocks of its cut, or all there is.
bool are_whole_blocks(const Shard& cut, int64_t size, int64_t start, int64_t length);

}  // namespace fsdp::testing
