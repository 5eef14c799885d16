// A trace of some steps by LibTorch's own profiler (Kineto), which Perfetto and
// chrome://tracing open: operators, and ranges of FSDP by the names of units. Those of
// collectives end with the bytes that they bring from other ranks, the numbers that
// counters (counters.h) add up: "fsdp::all_gather(block0) 4096 bytes".
//
//   fsdp::Profile profile("trace.json", {.first_step = 10, .last_step = 12});
//   for (const auto& batch : batches) {
//     loss(batch).backward();
//     profile.step();  // this one is over
//   }
//
// Ranges of a unit are all_gather, which issues a gather (inside prefetch, where that is
// before the unit is used), and all_gather_copy_out, which waits for it and copies where
// members show it; reduce_scatter, which sends gradients to be summed up, and all_reduce,
// over the replicas; with HFSDP outer_reduce_scatter and outer_all_gather; reshard, where
// unsharded parameters go; wait, where the host waits as Counters::wait_seconds adds up;
// and forward, by fsdp::forward (forward.h). Collectives of DTensors are redistribute,
// with what they do in place of a unit, and the bytes that CommunicationLog
// (tensor_parallel/communication_log.h) adds up, which this rank gives (of a broadcast:
// the tensor's, on every rank): "fsdp::redistribute(all-reduce over tp, Partial(sum) ->
// Replicate()) 128 bytes". Where an operator needs one, it lies within the operator's
// range.
#pragma once

#include "device_mesh/api.h"

#include <cstdint>
#include <limits>
#include <string>

namespace fsdp {

struct ProfileOptions {
  int64_t first_step = 1;  // the profile begins with it; the first is 1
  int64_t last_step = std::numeric_limits<int64_t>::max();
  bool on_every_rank = false;  // false: rank 0 alone, of the default process group
};

// One at a time in a process. Local.
class Profile {
 public:
  // Of several ranks each writes its own file: "trace.json" becomes "trace.rank3.json".
  // Throws ValueError for a range without steps, and for a path whose folder does not
  // exist.
  [[nodiscard]] FSDP_API explicit Profile(std::string path, ProfileOptions options = {});
  // Writes what was recorded, if last_step is not over.
  FSDP_API ~Profile();
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;

  // The current step is over, and the next one begins. Waits for the device where the
  // profile begins or ends. Throws c10::Error where the file cannot be written.
  FSDP_API void step();

 private:
  void begin();
  void write();

  std::string path_;  // empty: not on this rank
  ProfileOptions options_;
  int64_t step_ = 1;
  bool is_recording_ = false;
};

}  // namespace fsdp
