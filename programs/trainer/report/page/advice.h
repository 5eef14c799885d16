// What could be done about a run, and why. Pure.
#pragma once

#include "programs/trainer/report/page/unit_table.h"

#include <cstdint>
#include <string>
#include <vector>

namespace programs::run_report {

// Smaller units cost what starting a gather costs, whatever it brings.
constexpr int64_t kSmallUnit = 64 << 10;  // bytes
// A unit with more of the model leaves nothing to overlap with. Models below kSmallModel
// need no overlap.
constexpr double kLargeShare = 0.8;
constexpr int64_t kSmallModel = 1 << 20;  // bytes
constexpr double kMuchWaiting = 0.3;      // of the time
// The slowest rank computes so many times as long as the mean of the others, the others
// lose such a part of the step, and it is the slowest in such a part of the steps.
constexpr double kUnequal = 1.25;
constexpr double kLostToUnequal = 0.1;
constexpr double kMostSteps = 0.75;
// The host waits such a part of a step for one unit.
constexpr double kMuchExposed = 0.02;
constexpr double kManyUnused = 0.1;  // of all prefetches

struct RankLoad {
  double waiting = 0;            // share of its time
  double computing_seconds = 0;  // of a step
  double slowest = 0;            // share of the steps in which no rank computes longer
};

struct RunFacts {
  int64_t sharding_ranks = 1;  // that hold one model together
  int64_t replicas = 1;
  int64_t hosts = 1;
  int64_t ranks_on_host = 1;
  int64_t threads_per_rank = 1;
  int64_t cores = 1;            // of the host
  bool order_is_known = false;  // units were used before the profiled steps
  double step_seconds = 0;      // of the profiled steps' mean
  std::vector<RankLoad> ranks;  // empty: too few steps to tell
  std::vector<UnitRow> units;
};

struct Advice {
  std::string title, reason;
  bool operator==(const Advice&) const = default;
};

// What matters most first; nothing where all is well.
std::vector<Advice> advice(const RunFacts& run);

}  // namespace programs::run_report
