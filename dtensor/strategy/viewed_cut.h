// Where a cut of a tensor lies after a view of it: whether each rank can view the part it
// has, and how the result is then cut.
//
//   // [batch, 7 heads of 8] -> [batch, 7, 8] on 2 ranks: 4 and 3 heads.
//   viewed_cut({2, 56}, {2, 7, 8}, {.dim = 1, .unit = 8}, /*ranks=*/2);   // {.dim = 1}
//   // [batch, cut sequence, width] -> rows: each rank has some of every batch entry.
//   viewed_cut({2, 8, 16}, {16, 16}, {.dim = 1}, 2);                      // {.dim = 0, .outer = 2}
//
// No torch here.
#pragma once

#include "dtensor/placement.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace fsdp::internal {

// Where the elements that a rank has of a tensor [before] lie in its view [after]: a cut
// by which every rank has the same elements in the same order, written simplest
// (shard_layout.h). Nothing where there is none; of several a plain one. REQUIRES: as
// many elements in both, `cut` is one of `before`, ranks >= 1.
std::optional<Shard> viewed_cut(const std::vector<int64_t>& before,
                                const std::vector<int64_t>& after, const Shard& cut, int64_t ranks);

}  // namespace fsdp::internal
