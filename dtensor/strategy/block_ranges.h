// Parts of a dimension that is cut in blocks: whole blocks of it are cut as before, so
// that query, key and value come out of one cut matrix without being gathered. No torch
// here.
#pragma once

#include "dtensor/layout/tensor_layout.h"
#include "dtensor/placement.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace fsdp::internal {

// Elements [start, start + length) of a dimension.
struct Range {
  int64_t start = 0, length = 0;
};

// How those elements of a dimension of `size` elements that is cut so are cut, each of
// `ranks` ranks having what it has of them. Nothing where they are not whole blocks.
std::optional<Shard> cut_of_range(const Shard& cut, int64_t size, const Range& range,
                                  int64_t ranks);

// The inverse: the cut of a dimension of `size` elements, of which the range is cut so.
std::optional<Shard> cut_around_range(const Shard& part, int64_t size, const Range& range,
                                      int64_t ranks);

// Where the part of the range that the rank at `coordinate` has lies in its part of
// dimension `dim`. REQUIRES: the range is all of the dimension, or one mesh dimension
// cuts it and cut_of_range() gives a cut.
Range local_range(const TensorLayout& layout, const std::vector<int64_t>& coordinate, int64_t dim,
                  const Range& range);

}  // namespace fsdp::internal
