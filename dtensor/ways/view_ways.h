// Views that move dimensions about: a cut follows its dimension, and whole blocks of one
// that is cut in blocks. No torch here.
#pragma once

#include "dtensor/ways/block_ranges.h"
#include "dtensor/ways/call_geometry.h"
#include "dtensor/ways/operator_ways.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace fsdp::internal {

// Where each dimension of operand 0 goes; kGone: not all of it is in the result.
using DimMap = std::vector<int64_t>;
inline constexpr int64_t kGone = -1;

// Which dimensions of size 1 a call of squeeze takes away: not those of which only a part
// is of size 1.
DimMap squeeze_map(const CallGeometry& call);

// view(dtype): another dtype over the same bytes. The last dimension stays where elements
// are of one size.
std::vector<Way> view_dtype_ways(const CallGeometry& call, bool keeps_last);

// The elements that slice(self, dim, start, end, step) takes; nothing where a step leaves
// some out.
std::optional<Range> sliced_range(const CallGeometry& call);

// The pieces of split(self, size, dim) and split_with_sizes(self, sizes, dim).
std::vector<Range> split_ranges(const CallGeometry& call);

}  // namespace fsdp::internal
