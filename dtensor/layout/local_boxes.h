// Which boxes of a tensor the rank at a mesh coordinate holds: one, or where cuts have
// blocks (Shard::outer) one of each block. No torch here.
//
//   local_boxes({12}, {2}, {Shard{.dim = 0, .outer = 3}}, /*coordinate=*/{1});
//   // {2, 2}, {6, 2} and {10, 2} of the tensor, at 0, 2 and 4 of the rank's part
#pragma once

#include "dtensor/layout/shard_layout.h"
#include "dtensor/placement.h"

#include <cstdint>
#include <vector>

namespace fsdp::internal {

struct LocalBox {
  std::vector<Chunk> box;      // of the tensor: offset and length per dimension
  std::vector<int64_t> begin;  // where in the rank's part, which has local_shape(), it begins
  bool operator==(const LocalBox&) const = default;
};

// All that one mesh coordinate holds, in the order in which the boxes begin in its part.
// Mesh dimension m cuts as placements[m] says what an earlier one left, put together.
// Boxes that touch along a cut dimension are one. Of a part without elements one box
// without elements. REQUIRES: as of local_shape().
std::vector<LocalBox> local_boxes(const std::vector<int64_t>& shape,
                                  const std::vector<int64_t>& mesh_shape,
                                  const std::vector<Placement>& placements,
                                  const std::vector<int64_t>& coordinate);

}  // namespace fsdp::internal
