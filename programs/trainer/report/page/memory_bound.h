// How many bytes a step needs at most beside shards, sharded gradients and states of
// optimizers: the formulas of docs/design/memory.md. Pure.
#pragma once

#include "programs/trainer/report/page/unit_facts.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace programs::run_report {

// Where a rank has unsharded parameters.
enum class Unsharded { kGathered, kInPlace };

struct Sharding {
  Unsharded where = Unsharded::kGathered;
  int64_t ranks = 1;  // that shard
  bool has_replicas = false;
  // Of backwards that were not synchronised, which stay until one is.
  bool has_pending_gradients = false;
};

// `units` with the root among them. Of policies that keep units unsharded it knows
// nothing. None where replicas hold all that there is, for which there is no formula.
std::optional<int64_t> memory_bound(const std::vector<UnitFacts>& units, const Sharding& sharding);

// Of unsharded parameters alone: the root's, and those of two units beside it.
int64_t unsharded_bound(const std::vector<UnitFacts>& units);

}  // namespace programs::run_report
