// Strategies that fit only where every rank has elements: some of LibTorch's kernels
// refuse an empty part, or divide by its size. No torch here.
#pragma once

#include "dtensor/strategy/op_schema.h"
#include "dtensor/strategy/placement_strategy.h"

#include <vector>

namespace fsdp::internal {

// `strategies` without those that take no empty parts (takes_empty_parts) and would leave
// an empty part of an operand on some rank.
std::vector<PlacementStrategy> without_empty_parts(std::vector<PlacementStrategy> strategies,
                                                   const OpSchema& call);

}  // namespace fsdp::internal
