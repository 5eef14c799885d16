#include "dtensor/strategy/redistribute_cost.h"

namespace fsdp::internal {
namespace {

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

}  // namespace

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

}  // namespace fsdp::internal
