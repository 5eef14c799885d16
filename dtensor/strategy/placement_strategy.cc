#include "dtensor/strategy/placement_strategy.h"

namespace fsdp::internal {
namespace {

std::string joined(const std::vector<Placement>& placements) {
  std::string text;
  for (const Placement& placement : placements) {
    text += (text.empty() ? "" : ", ") + to_string(placement);
  }
  return text;
}

}  // namespace

PlacementStrategy replicated_strategy(size_t results, size_t operands) {
  return {.results = std::vector<Placement>(results, Replicate{}),
          .operands = std::vector<Placement>(operands, Replicate{})};
}

std::string to_string(const PlacementStrategy& strategy) {
  return joined(strategy.operands) + " -> " + joined(strategy.results);
}

}  // namespace fsdp::internal
