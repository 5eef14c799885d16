// One step of one rank as a person looks at it: which phase it was in, which gathers and
// reductions were on their way, when it waited, when DTensors moved, and when each unit
// was unsharded.
#pragma once

#include "programs/trainer/report/page/trace.h"

#include <cstdint>
#include <string>
#include <vector>

namespace programs::run_report {

// Seconds from the beginning of the step.
struct Span {
  std::string of;  // a phase, a unit, or what a redistribution does
  double begin = 0, end = 0;
  bool operator==(const Span&) const = default;
};

struct Gather : Span {       // from its issue until its unit is unsharded
  bool is_prefetch = false;  // issued before its unit was used
  bool is_used = true;       // false: dropped without use
  int64_t bytes = 0;         // from other ranks
  double waited = 0;         // seconds of the host
  bool operator==(const Gather&) const = default;
};

// Forward, backward and the optimizer: not what it does beside them.
bool computes(const Span& phase);

struct RankStep {
  int64_t number = 0;
  double clock = 0;  // where it begins, in seconds by the host's clock from the trace's base
  double seconds = 0;
  std::vector<Span> phases, reductions, waits;
  std::vector<Span> redistributions;  // in phases that compute
  std::vector<Gather> gathers;        // those issued in this step
  std::vector<Span> unsharded;        // what of it lies within the step
};

// The steps that are in the trace from end to end, in their order. A unit that was
// unsharded before the trace begins counts as that once it is resharded.
std::vector<RankStep> steps_of(const Trace& trace);

}  // namespace programs::run_report
