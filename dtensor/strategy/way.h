// One way in which an operator may run on parts, along one mesh dimension: how its
// operands must lie, and how its results then do.
//
//   Way{.results = {Shard{0}}, .operands = {Shard{0}, Replicate{}}};   // rows of a product
//
// An operator has several, its family's table lists them. Each is exact whatever the
// sizes: parts may be uneven, and empty unless it says otherwise. So each mesh dimension
// may go a way of its own, since the parts that one leaves are operands of the same
// operator to the next. No torch here.
#pragma once

#include "dtensor/placement.h"

#include <cstddef>
#include <string>
#include <vector>

namespace fsdp::internal {

struct Way {
  std::vector<Placement> results;
  std::vector<Placement> operands;  // one per tensor argument; Replicate for absent ones
  bool takes_empty_parts = true;
  bool asks_other_ranks = false;  // what each does on its part (OpEntry::local_kernel)

  bool operator==(const Way&) const = default;
};

// Everything on every rank: what every operator can do.
Way replicated_way(size_t results, size_t operands);

std::string to_string(const Way& way);  // "Shard(0), Replicate() -> Shard(0)"

}  // namespace fsdp::internal
