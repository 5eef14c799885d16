// The order in which a redistribution changes placements, one mesh dimension at a time
// (PyTorch's transform infos). No torch here.
//
//   redistribute_plan({Shard{0}, Shard{0}}, {Replicate{}, Shard{0}})
//     // {1, Shard(0), Replicate()}, {0, Shard(0), Replicate()}, {1, Replicate(), Shard(0)}
#pragma once

#include "dtensor/placement.h"

#include <cstddef>
#include <vector>

namespace fsdp::internal {

struct RedistributeMove {
  size_t mesh_dim;
  Placement from, to;  // never equal

  bool operator==(const RedistributeMove&) const = default;
};

// One placement per mesh dimension in both. A cut that lies inside another cut of the
// same tensor dimension is undone before the outer one changes, the innermost first.
// Terms that become whole anyway do so before the value is split into terms of another
// kind, which need not commute.
std::vector<RedistributeMove> redistribute_plan(const std::vector<Placement>& from,
                                                const std::vector<Placement>& to);

}  // namespace fsdp::internal
