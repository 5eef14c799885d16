#include "dtensor/strategy/propagate.h"

#include "dtensor/strategy/empty_parts.h"
#include "dtensor/strategy/interleaved_strategy.h"
#include "dtensor/strategy/redistribute_cost.h"

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

bool cuts_something(const CallPlacements& placements, size_t mesh_dim) {
  return std::any_of(placements.operands.begin(), placements.operands.end(),
                     [&](const auto& operand) { return operand[mesh_dim].is_shard(); });
}

// Ranks along `mesh_dim` and along all others that cut.
int64_t parts_with(const CallPlacements& placements, size_t mesh_dim) {
  int64_t parts = 1;
  for (size_t m = 0; m < placements.mesh_shape.size(); ++m) {
    if (m == mesh_dim || cuts_something(placements, m)) parts *= placements.mesh_shape[m];
  }
  return parts;
}

std::vector<Arrival> arrivals(const OpSchema& call, const CallPlacements& placements,
                              size_t mesh_dim) {
  std::vector<Arrival> arrivals;
  for (size_t i = 0; i < call.operands.size(); ++i) {
    arrivals.push_back(
        {.placement = placements.operands[i][mesh_dim], .bytes = call.operands[i].bytes()});
  }
  return arrivals;
}

std::vector<PlacementStrategy> possible_strategies(std::vector<PlacementStrategy> strategies,
                                                   const CallPlacements& placements,
                                                   size_t mesh_dim) {
  if (!placements.written.has_value()) return strategies;
  const size_t written = *placements.written;
  const Placement& own = placements.operands[written][mesh_dim];
  std::erase_if(strategies, [&](const PlacementStrategy& strategy) {
    return strategy.operands[written] != own || strategy.results[0] != own;
  });
  return strategies;
}

// Whether a dimension that `placements` cuts already, along an earlier mesh dimension,
// would be cut by `next` in blocks: only the first cut of a dimension may be so.
bool is_inside_another(const TensorPlacements& placements, const Placement& next) {
  return next.is_shard() && !next.can_lie_inside_a_cut() &&
         std::any_of(placements.begin(), placements.end(),
                     [&](const auto& cut) { return cut.is_shard(next.shard_dim()); });
}

bool fits_inside(const Propagation& earlier, const PlacementStrategy& strategy) {
  for (size_t i = 0; i < strategy.operands.size(); ++i) {
    if (is_inside_another(earlier.operands[i], strategy.operands[i])) return false;
  }
  for (size_t i = 0; i < strategy.results.size(); ++i) {
    if (is_inside_another(earlier.results[i], strategy.results[i])) return false;
  }
  return true;
}

std::vector<Placement> arriving_along(const CallPlacements& placements, size_t mesh_dim) {
  std::vector<Placement> arriving;
  for (const auto& operand : placements.operands) arriving.push_back(operand[mesh_dim]);
  return arriving;
}

// The only term of a sum is the sum.
std::vector<Placement> without_terms(std::vector<Placement> results) {
  for (Placement& placement : results) {
    if (placement.is_partial()) placement = Replicate{};
  }
  return results;
}

void append(const std::vector<Placement>& placements, std::vector<TensorPlacements>& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i].push_back(placements[i]);
}

}  // namespace

Propagation propagate(const StrategyFunction& strategies, OpSchema call,
                      const CallPlacements& placements, size_t results) {
  Propagation propagation{.operands = std::vector<TensorPlacements>(call.operands.size()),
                          .results = std::vector<TensorPlacements>(results)};
  const PlacementStrategy replicated = replicated_strategy(results, call.operands.size());
  for (size_t m = 0; m < placements.mesh_shape.size(); ++m) {
    call.parts = parts_with(placements, m);
    call.arriving = arriving_along(placements, m);
    call.ranks = placements.mesh_shape[m];
    auto candidates =
        without_empty_parts(with_interleaved_strategies(strategies(call), call), call);
    candidates = possible_strategies(std::move(candidates), placements, m);
    std::erase_if(candidates, [&](const PlacementStrategy& strategy) {
      return !fits_inside(propagation, strategy);
    });
    const PlacementStrategy* const chosen =
        cheapest_strategy(candidates, arrivals(call, placements, m), placements.mesh_shape[m]);
    const PlacementStrategy& strategy = chosen != nullptr ? *chosen : replicated;
    append(strategy.operands, propagation.operands);
    append(placements.mesh_shape[m] > 1 ? strategy.results : without_terms(strategy.results),
           propagation.results);
  }
  return propagation;
}

}  // namespace fsdp::internal
