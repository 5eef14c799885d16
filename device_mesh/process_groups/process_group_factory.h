// The making of c10d process groups of the backends that are in the table
// (backend_table.h), which tensors on CPU pass through Gloo in, but for "fake".
//
// Every function that makes a group is collective over the ranks of the new group, and
// over no others: its name in the store follows from the ranks, and from how often this
// rank has opened a group of that name.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace fsdp::internal {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// What this build has for the accelerator that the process sees: "nccl" for CUDA; "gloo"
// where there is none.
std::string preferred_backend();

struct GroupRequest {
  std::string backend;  // its name in the table
  c10::intrusive_ptr<c10d::Store> store;
  int64_t rank = 0;
  int64_t world_size = 1;
  std::chrono::milliseconds timeout;               // of a collective
  std::chrono::steady_clock::time_point deadline;  // for making the group
  std::string advice;                              // what to look at where ranks are missing

  GroupRequest();
  ~GroupRequest();
};

// The group of the whole world. Throws ValueError that lists the backends for an unknown
// one, and what connect_gloo() throws (gloo_connection.h).
Group make_world_group(const GroupRequest& request);

// A group over `parent_ranks` (ranks within `parent`, in the order of the new group),
// with the parent's backend and timeout, also for making it. The calling rank must be
// among them. `purpose` tells groups over the same ranks apart and is printed in errors.
// Throws NotImplementedError when the parent's backend is not in the table, and what
// connect_gloo() throws.
Group make_subgroup(const Group& parent, const std::vector<int64_t>& parent_ranks,
                    const std::string& purpose);

// Brings up what the backend for `device`, which this rank uses, communicates through, as
// its first collective there would. Nothing where that was done, or needs nothing. Blocks
// until all ranks are here; collective over `group`.
void connect(const Group& group, c10::Device device);

// The global ranks of `group`'s members, as its backend was told; 0 .. size-1 when it was
// not.
std::vector<int64_t> global_ranks(const Group& group);

// Ends the communication of a group that will not be used again; waits for what is in
// flight. Local.
void shut_down(const Group& group);

}  // namespace fsdp::internal
