#include "dtensor/strategy/propagate.h"

#include "dtensor/layout/shard_layout.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

// What follows is for with_interleaved_strategies().

// The length of every dimension that the strategy cuts; none where they differ.
std::optional<int64_t> cut_length(const PlacementStrategy& strategy, const OpSchema& call) {
  std::optional<int64_t> length;
  for (size_t i = 0; i < strategy.operands.size(); ++i) {
    if (!strategy.operands[i].is_shard()) continue;
    const int64_t size = call.operands[i].size(strategy.operands[i].shard_dim());
    if (length.has_value() && *length != size) return std::nullopt;
    length = size;
  }
  return length;
}

void cut_alike(std::vector<Placement>& placements, const Shard& cut) {
  for (Placement& placement : placements) {
    if (placement.is_shard()) placement = Placement(cut).along(placement.shard_dim());
  }
}

bool lets_stay(const PlacementStrategy& strategy, const std::vector<Placement>& arriving) {
  for (size_t i = 0; i < arriving.size(); ++i) {
    if (arriving[i].is_interleaved() && strategy.operands[i] == arriving[i]) return true;
  }
  return false;
}

bool is_interleaved(const PlacementStrategy& strategy) {
  const auto interleaved = [](const Placement& placement) { return placement.is_interleaved(); };
  return std::any_of(strategy.operands.begin(), strategy.operands.end(), interleaved) ||
         std::any_of(strategy.results.begin(), strategy.results.end(), interleaved);
}

std::optional<PlacementStrategy> cut_as(PlacementStrategy strategy, const Shard& cut,
                                        const OpSchema& call) {
  if (is_interleaved(strategy)) return std::nullopt;
  const auto length = cut_length(strategy, call);
  if (!length.has_value() || !divides(cut, *length)) return std::nullopt;
  cut_alike(strategy.operands, cut);
  cut_alike(strategy.results, cut);
  if (!lets_stay(strategy, call.arriving)) return std::nullopt;
  return strategy;
}

// For without_empty_parts().

// Of chunks, the last is the smallest; of parts with local_units, any.
bool leaves_a_part_empty(const Operand& operand, const Placement& placement, int64_t parts) {
  if (!operand.is_present() || !placement.is_shard()) return false;
  const auto& units = placement.shard().local_units;
  for (int64_t i = 0; units.has_value() && i < parts; ++i)
    if (units.at(i) == 0) return true;
  const int64_t atoms = atoms_of(placement.shard(), operand.size(placement.shard_dim()));
  return chunk_of(atoms, parts, parts - 1).length == 0;
}

bool leaves_a_part_empty(const PlacementStrategy& strategy, const OpSchema& call) {
  for (size_t i = 0; i < strategy.operands.size(); ++i) {
    if (leaves_a_part_empty(call.operands[i], strategy.operands[i], call.parts)) return true;
  }
  return false;
}

// For cheapest_strategy().

int64_t cost_of(const std::vector<Placement>& targets, const std::vector<Arrival>& operands,
                int64_t parts) {
  int64_t cost = 0;
  for (size_t i = 0; i < operands.size(); ++i) {
    cost += redistribute_cost(operands[i].placement, targets[i], operands[i].bytes, parts);
  }
  return cost;
}

bool keeps_an_operand(const PlacementStrategy& strategy, const std::vector<Arrival>& operands) {
  for (size_t i = 0; i < operands.size(); ++i) {
    if (!operands[i].placement.is_replicate() && operands[i].placement == strategy.operands[i])
      return true;
  }
  return false;
}

// For propagate().

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

std::vector<PlacementStrategy> with_interleaved_strategies(
    std::vector<PlacementStrategy> strategies, const OpSchema& call) {
  const size_t plain = strategies.size();
  for (const Placement& placement : call.arriving) {
    if (!placement.is_interleaved()) continue;
    for (size_t i = 0; i < plain; ++i) {
      const auto strategy = cut_as(strategies[i], placement.shard(), call);
      if (strategy.has_value() &&
          std::find(strategies.begin(), strategies.end(), *strategy) == strategies.end())
        strategies.push_back(*strategy);
    }
  }
  return strategies;
}

std::vector<PlacementStrategy> without_empty_parts(std::vector<PlacementStrategy> strategies,
                                                   const OpSchema& call) {
  std::erase_if(strategies, [&](const PlacementStrategy& strategy) {
    return !strategy.takes_empty_parts && leaves_a_part_empty(strategy, call);
  });
  return strategies;
}

int64_t redistribute_cost(const Placement& from, const Placement& to, int64_t bytes,
                          int64_t parts) {
  if (parts == 1 || from == to || from.is_replicate()) return 0;
  if (from.is_shard()) return to.is_shard() ? bytes : bytes * parts;
  return to.is_shard() ? bytes * parts : 2 * bytes * parts;
}

const PlacementStrategy* cheapest_strategy(const std::vector<PlacementStrategy>& strategies,
                                           const std::vector<Arrival>& operands, int64_t parts) {
  const std::vector<Placement> whole(operands.size(), Replicate{});
  const int64_t replicated = cost_of(whole, operands, parts);
  const PlacementStrategy* best = nullptr;
  int64_t least = 0;
  for (const PlacementStrategy& strategy : strategies) {
    if (!keeps_an_operand(strategy, operands)) continue;
    const int64_t cost = cost_of(strategy.operands, operands, parts);
    if (cost > replicated || (best != nullptr && cost >= least)) continue;
    best = &strategy;
    least = cost;
  }
  return best;
}

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
