// What a trace of fsdp::Profile (fully_shard/profile.h) says of steps, of their phases
// and of units: the ranges "fsdp::..." of the library and "train::..." of the example
// (training_range.h). Operators are left out.
#pragma once

#include <cstdint>
#include <istream>
#include <string>
#include <vector>

namespace programs::run_report {

enum class RangeKind {
  kStep,         // of: its number
  kPhase,        // of: its name
  kGather,       // issues it
  kOuterGather,  // issues one over HFSDP's outer dimension, before a kGather of the unit
  kPrefetch,     // around such a kGather, where the unit is not used yet
  kCopyOut,      // waits for it
  kReduction,
  kWait,  // the host, for a gather or a reduction
  kReshard,
  kRedistribution  // of: what it does, since it is of no unit
};

struct Range {
  RangeKind kind;
  std::string of;     // the unit, as ranges call it: "(root)"
  int64_t bytes = 0;  // from other ranks; of a redistribution, that this rank gives
  double begin = 0;   // seconds by the host's clock, from `base`
  double end = 0;     // of the same clock
  bool operator==(const Range&) const = default;
};

struct Trace {
  int64_t base_nanoseconds = 0;  // by the host's clock, where ranges have 0
  std::vector<Range> ranges;     // by their beginnings, outer ones first
};

// Throws std::invalid_argument for what is no trace.
Trace trace_in(std::istream& json);
// Of a file; throws std::invalid_argument, naming it, where it cannot be read either.
Trace read_trace(const std::string& path);

}  // namespace programs::run_report
