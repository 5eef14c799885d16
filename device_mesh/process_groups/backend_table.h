// The backends of process groups, by name: which device types each one serves, and how a
// rank's part of a new group is made. "gloo", "nccl" and "fake" are in it from the start.
//
//   add_backend("mine", {.device_types = {c10::kXPU}, .make = make_my_backend});
//   init_process_group({.backend = "mine"});
//
// One table for the process, from which nothing is taken again. Thread-safe. Local.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace fsdp::internal {

// One rank of a new group, as its backend is told.
struct GroupMember {
  c10::intrusive_ptr<c10d::Store> store;  // the group's own key space
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout;  // of a collective
  std::string name;                   // of the group
  std::vector<uint64_t> global_ranks;

  GroupMember();
  GroupMember(const GroupMember&);
  ~GroupMember();
};

using MakeBackend = std::function<c10::intrusive_ptr<c10d::Backend>(const GroupMember&)>;
using ConnectBackend = std::function<void(c10d::Backend&, c10::Device)>;

struct BackendEntry {
  // What `make` serves; none for Gloo alone. The first one of which there are devices is
  // the one that a process selects by its local rank.
  std::vector<c10::DeviceType> device_types = {};
  // Null where this build lacks the backend. What it returns has the name under which it
  // is in the table, and knows its options: timeout and global ranks.
  MakeBackend make = {};
  // Connects the ranks of a group on their devices, where no collective has done so yet;
  // null where nothing is to be done. Collective over the group.
  ConnectBackend connect = {};
  // Tensors on CPU go through Gloo beside it. Such a backend can wait for pending works,
  // which shutting down does first.
  bool has_gloo = true;

  bool is_in_this_build() const { return make || device_types.empty(); }
  bool is_for_devices() const { return has_gloo && !device_types.empty(); }
  bool serves(c10::DeviceType type) const;
};

// Throws ValueError for a name that is taken.
void add_backend(const std::string& name, BackendEntry entry);
// Null for a name that is not in the table; else good for the life of the process.
const BackendEntry* find_backend(const std::string& name);
// All names, for errors: "'gloo', 'nccl' and 'fake'".
std::string names_of_backends();
// The one that this build has for devices of this type, the first added of several;
// "gloo" where there is none.
std::string backend_for(c10::DeviceType type);

}  // namespace fsdp::internal
