// A placement strategy of an operator along one mesh dimension: placements of its tensor
// arguments, and those of its results when each rank runs it on its parts. (PyTorch's
// OpSpec, formerly PlacementStrategy, for one mesh dimension.)
//
//   PlacementStrategy{.results = {Shard{0}}, .operands = {Shard{0}, Replicate{}}};   // rows of a product
//
// An operator has several; those of its family are in dtensor/ops/. Each is exact
// whatever the sizes: parts may be uneven, and empty unless it says otherwise. So each
// mesh dimension may have a strategy of its own: the parts that one leaves are operands
// of the same operator to the next. No torch here.
#pragma once

#include "dtensor/placement.h"

#include <cstddef>
#include <string>
#include <vector>

namespace fsdp::internal {

struct PlacementStrategy {
  std::vector<Placement> results;
  std::vector<Placement> operands;  // one per tensor argument; Replicate for absent ones
  bool takes_empty_parts = true;
  bool asks_other_ranks = false;  // what each does on its part (OpEntry::local_kernel)

  bool operator==(const PlacementStrategy&) const = default;
};

// Everything replicated, which fits every operator.
PlacementStrategy replicated_strategy(size_t results, size_t operands);

std::string to_string(const PlacementStrategy& strategy);  // "Shard(0), Replicate() -> Shard(0)"

}  // namespace fsdp::internal
