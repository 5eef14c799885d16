// Where a cut of a tensor lies after a view of it: whether each rank can view the part
// that it has, and how the result is then cut. A reshaped tensor keeps a cut that some
// dimension can describe (viewed_cut). Of a dimension that is cut in blocks whole blocks
// are cut as before (cut_of_range), so that query, key and value come out of one cut
// matrix without being gathered. No torch here.
#pragma once

#include "dtensor/layout/tensor_layout.h"
#include "dtensor/placement.h"
#include "dtensor/strategy/op_schema.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace fsdp::internal {

// Where the elements that a rank has of a tensor [before] lie in its view [after]: a cut
// by which every rank has the same elements in the same order, written simplest
// (shard_layout.h). Nothing where there is none; of several a plain one. REQUIRES: as
// many elements in both, `cut` is one of `before`, ranks >= 1.
//
//   // [batch, 7 heads of 8] -> [batch, 7, 8] on 2 ranks: 4 and 3 heads.
//   viewed_cut({2, 56}, {2, 7, 8}, {.dim = 1, .unit = 8}, /*ranks=*/2);   // {.dim = 1}
//   // [batch, cut sequence, width] -> rows: each rank has some of every batch entry.
//   viewed_cut({2, 8, 16}, {16, 16}, {.dim = 1}, 2);                      // {.dim = 0, .outer = 2}
std::optional<Shard> viewed_cut(const std::vector<int64_t>& before,
                                const std::vector<int64_t>& after, const Shard& cut, int64_t ranks);

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

// The elements that slice(self, dim, start, end, step) takes; nothing where a step leaves
// some out.
std::optional<Range> sliced_range(const OpSchema& call);

}  // namespace fsdp::internal
