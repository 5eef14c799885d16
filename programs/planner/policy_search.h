// Which ways of sharding a job are worth planning, and which of those that fit receives
// least. No torch here.
#pragma once

#include "programs/planner/step_estimate.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace programs {

enum class Reshard { kAfterForward, kKeep, kToNode };
enum class Activations { kKept, kRecomputed };

// One way to shard.
struct ShardingPolicy {
  int64_t replicas = 1;  // hybrid sharding
  int64_t tp = 1;
  Reshard reshard = Reshard::kAfterForward;
  Activations activations = Activations::kKept;

  bool operator==(const ShardingPolicy&) const = default;
};
// "replicas 4, tp 8, reshard to the node, activations recomputed"
std::string to_string(const ShardingPolicy& policy);

struct SearchSpace {
  int64_t ranks = 1;
  int64_t ranks_per_node = 8;
  int64_t kv_heads = 1;  // tensor parallelism cuts them whole
};

// Every combination of: replicas that make the shards of one copy fill a node, eight
// nodes, or all; tp of 1, 2, 4, ... within a node; what becomes of unsharded parameters
// after forward, kToNode only where shards go beyond a node; activations. Each once, the
// policies that recompute right behind those that do not.
std::vector<ShardingPolicy> policies_to_plan(const SearchSpace& space);

// What planning one gave, per rank.
struct PlannedPolicy {
  ShardingPolicy policy;
  double peak_bytes = 0;
  double resident_bytes = 0;  // of these, shards of parameters and gradients, and optimizer state
  LinkBytes received;         // in one step
  double flops = 0;
  double tokens = 0;  // of the global batch
};

// Those that fit into `bytes`, the one that receives least for each token first: by the
// time that the links need for it. Of several, the one that computes least.
std::vector<PlannedPolicy> fitting(const std::vector<PlannedPolicy>& planned, double bytes,
                                   const MachineRates& rates);

// The smallest peak; nothing of nothing.
std::optional<PlannedPolicy> smallest(const std::vector<PlannedPolicy>& planned);

}  // namespace programs
