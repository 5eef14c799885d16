// Counters of what a device was asked for since the machine was last reset.
#pragma once

#include "tests/simulated_accelerator/call_site.h"

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>

namespace fsdp::testing::simulated {

// How often something was done, by name and, where they are recorded, by the place that
// did it.
struct Tally {
  int64_t total = 0;
  std::map<std::string, int64_t> by_name;
  std::map<std::pair<std::string, CallSite>, int64_t> by_place;

  void add(const std::string& name, const CallSite& place) {
    ++total;
    ++by_name[name];
    if (!place.empty()) ++by_place[{name, place}];
  }
};

struct Counters {
  Tally launches;            // of kernels and copies
  Tally collectives;         // by kind
  Tally host_syncs;          // by what the host waits for
  Tally queries;             // whether an event or a stream is done: not in a captured graph
  Tally run_on_true_values;  // operators whose shape neither zeros nor ones gave (shape_kernel.h)
  int64_t record_streams = 0;
  int64_t allocations = 0;
  int64_t reused_blocks = 0;    // of the allocations
  int64_t allocated_bytes = 0;  // now
  int64_t peak_allocated_bytes = 0;
  int64_t requested_bytes = 0;  // the same without what blocks are larger
  int64_t peak_requested_bytes = 0;
  int64_t reserved_bytes = 0;  // of all blocks
  std::set<std::thread::id> launching_threads;
};

// One line for each place, the most frequent first.
std::string places(const Tally& tally);

}  // namespace fsdp::testing::simulated
