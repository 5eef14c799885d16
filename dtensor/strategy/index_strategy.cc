#include "dtensor/strategy/index_strategy.h"

#include <algorithm>

namespace fsdp::internal {

std::vector<PlacementStrategy> equal_dims_strategy(const OpSchema& call, int64_t dim) {
  std::vector<PlacementStrategy> strategies;
  for (int64_t d = 0; d < call.operands[0].ndim(); ++d) {
    const bool fits =
        std::all_of(call.operands.begin(), call.operands.end(), [&](const Operand& operand) {
          return operand.ndim() == call.operands[0].ndim() &&
                 operand.size(d) == call.operands[0].size(d);
        });
    if (d == dim || !fits) continue;
    strategies.push_back({.results = {Shard{d}},
                          .operands = std::vector<Placement>(call.operands.size(), Shard{d})});
  }
  return strategies;
}

std::vector<ResultGeometry> results_as_self(const OpSchema& call) {
  return {laid_as(call.operands[0].shape, call.operands[0].stride)};
}

}  // namespace fsdp::internal
