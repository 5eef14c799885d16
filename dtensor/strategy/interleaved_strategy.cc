#include "dtensor/strategy/interleaved_strategy.h"

#include "dtensor/layout/shard_layout.h"

#include <algorithm>
#include <optional>

namespace fsdp::internal {
namespace {

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

}  // namespace fsdp::internal
