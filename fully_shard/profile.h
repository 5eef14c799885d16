// A trace of some steps by LibTorch's own profiler (Kineto), which Perfetto and
// chrome://tracing open: operators, and ranges of FSDP by the names of units. Those of
// collectives end with the bytes that they bring from other ranks, the numbers that
// counters (counters.h) add up: "fsdp::all_gather(block0) 4096 bytes".
//
//   fsdp::Profile profile("trace.json", {.first_step = 10, .last_step = 12});
//   for (int64_t step = 1; step <= steps; ++step) {
//     ...
//     profile.step();  // this one is over
//   }
//
//   fsdp::all_gather(unit)             a gather is issued; inside fsdp::prefetch(unit) where
//                                      that is before the unit is used
//   fsdp::all_gather_copy_out(unit)    it is waited for, and copied where members show it
//   fsdp::reduce_scatter(unit)         gradients are sent to be summed up
//   fsdp::all_reduce(unit)             sums go over the replicas; with HFSDP these are
//   fsdp::outer_reduce_scatter(unit)   cut, and shards come back by an
//   fsdp::outer_all_gather(unit)
//   fsdp::reshard(unit)                the unsharded parameters go
//   fsdp::wait(unit)                   the host waits; what Counters::wait_seconds adds up
//   fsdp::forward(unit)                by fsdp::forward (forward.h)
#pragma once

#include "device_mesh/api.h"

#include <cstdint>
#include <limits>
#include <string>

namespace fsdp {

struct ProfileOptions {
  int64_t first_step = 1;  // whose beginning is the profile's, from 1
  int64_t last_step = std::numeric_limits<int64_t>::max();
  bool on_every_rank = false;  // false: rank 0 alone, of the default process group
};

// One at a time in a process. Local.
class FSDP_API Profile {
 public:
  // Of several ranks each writes its own file: "trace.json" becomes "trace.rank3.json".
  // Throws ValueError for steps that are none, or a path of no folder.
  [[nodiscard]] explicit Profile(std::string path, ProfileOptions options = {});
  // Writes what was recorded, if last_step is not over.
  ~Profile();
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;

  // The current step is over, and the next one begins. Waits for the device where the
  // profile begins or ends. Throws c10::Error where the file cannot be written.
  void step();

 private:
  void begin();
  void write();

  std::string path_;  // empty: not on this rank
  ProfileOptions options_;
  int64_t step_ = 1;
  bool is_recording_ = false;
};

}  // namespace fsdp
