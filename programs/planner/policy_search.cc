#include "programs/planner/policy_search.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <set>
#include <utility>

namespace programs {
namespace {

constexpr int64_t kNodesOfOneCopy = 8;

// Ranks that hold one copy of the parameters between them.
std::set<int64_t, std::greater<>> copies(const SearchSpace& space, int64_t tp) {
  const int64_t all = space.ranks / tp;
  std::set<int64_t, std::greater<>> sizes = {all};
  for (const int64_t nodes : {int64_t{1}, kNodesOfOneCopy}) {
    const int64_t size = nodes * space.ranks_per_node / tp;
    if (size > 1 && size < all && all % size == 0) sizes.insert(size);
  }
  return sizes;
}

std::vector<Reshard> ways_to_reshard(const SearchSpace& space, int64_t copy, int64_t tp) {
  std::vector<Reshard> ways = {Reshard::kAfterForward, Reshard::kKeep};
  const int64_t in_node = space.ranks_per_node / tp;
  if (in_node > 1 && copy > in_node && copy % in_node == 0) ways.push_back(Reshard::kToNode);
  return ways;
}

double communication_per_token(const PlannedPolicy& planned, const MachineRates& rates) {
  return estimate_step(planned.flops, planned.received, rates).communication_seconds /
         planned.tokens;
}

}  // namespace

std::string to_string(const ShardingPolicy& policy) {
  std::string text =
      "replicas " + std::to_string(policy.replicas) + ", tp " + std::to_string(policy.tp) + ", ";
  switch (policy.reshard) {
    case Reshard::kAfterForward:
      text += "reshard after forward";
      break;
    case Reshard::kKeep:
      text += "keep until backward";
      break;
    case Reshard::kToNode:
      text += "reshard to the node";
      break;
  }
  return text + (policy.activations == Activations::kRecomputed ? ", activations recomputed" : "");
}

std::vector<ShardingPolicy> policies_to_plan(const SearchSpace& space) {
  std::vector<ShardingPolicy> policies;
  for (int64_t tp = 1; tp <= space.ranks_per_node && tp <= space.ranks; tp *= 2) {
    if (space.ranks % tp != 0 || space.ranks_per_node % tp != 0 || space.kv_heads % tp != 0)
      continue;
    for (const int64_t copy : copies(space, tp)) {
      for (const auto reshard : ways_to_reshard(space, copy, tp)) {
        for (const auto activations : {Activations::kKept, Activations::kRecomputed})
          policies.push_back({space.ranks / tp / copy, tp, reshard, activations});
      }
    }
  }
  return policies;
}

std::vector<PlannedPolicy> fitting(const std::vector<PlannedPolicy>& planned, double bytes,
                                   const MachineRates& rates) {
  std::vector<PlannedPolicy> fit;
  std::copy_if(planned.begin(), planned.end(), std::back_inserter(fit),
               [bytes](const PlannedPolicy& one) { return one.peak_bytes <= bytes; });
  const auto cost = [&rates](const PlannedPolicy& one) {
    return std::pair(communication_per_token(one, rates), one.flops / one.tokens);
  };
  std::stable_sort(fit.begin(), fit.end(), [&](const PlannedPolicy& a, const PlannedPolicy& b) {
    return cost(a) < cost(b);
  });
  return fit;
}

std::optional<PlannedPolicy> smallest(const std::vector<PlannedPolicy>& planned) {
  const auto found = std::min_element(
      planned.begin(), planned.end(),
      [](const PlannedPolicy& a, const PlannedPolicy& b) { return a.peak_bytes < b.peak_bytes; });
  return found == planned.end() ? std::nullopt : std::optional(*found);
}

}  // namespace programs
