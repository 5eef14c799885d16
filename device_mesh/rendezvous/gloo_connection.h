// Makes the Gloo backend of a new process group: its ranks find each other in the store,
// choose how they reach each other, and connect.
#pragma once

#include "device_mesh/rendezvous/presence.h"

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace c10d {
class ProcessGroupGloo;
class Store;
}  // namespace c10d
namespace gloo::transport {
class Device;
}

namespace fsdp::internal {

using GlooDevices = std::vector<std::shared_ptr<::gloo::transport::Device>>;

// Where this process runs.
Presence presence();

// One device for `address`, or one for each interface of GLOO_SOCKET_IFNAME.
GlooDevices open_gloo_devices(const std::string& address);

class PeerMemory;

struct GlooRequest {
  c10::intrusive_ptr<c10d::Store> store;           // of the group that this one is made from
  std::string key_space;                           // there, the same on all its ranks
  int64_t opener = 0;                              // this rank's number there
  std::string name;                                // the group's description
  std::vector<int64_t> ranks;                      // of the job, by group rank
  int64_t index = 0;                               // this rank's, in the group
  std::chrono::milliseconds timeout;               // of a collective
  std::chrono::steady_clock::time_point deadline;  // for making the group
  std::string advice;                              // what to look at where ranks are missing
  // Why not all ranks of the group can come any more (RollCallOptions).
  std::function<std::string()> why_gone = {};
  GlooDevices devices = {};  // those of the parent; none: of the world, chosen here

  GlooRequest();
  GlooRequest(const GlooRequest&);
  ~GlooRequest();
};

struct GlooGroup {
  c10::intrusive_ptr<c10d::Store> store;  // the group's own key space
  c10::intrusive_ptr<c10d::ProcessGroupGloo> backend;
  std::shared_ptr<PeerMemory> memory;  // of a world: what ranks of this host share; may be null
};

// Collective over the ranks of the new group. Returns or throws within 3 s of the
// deadline, whatever happens to hosts and links: DistStoreError that names the ranks that
// are missing, or what this rank was waiting for; ValueError for two processes of one
// rank, unequal world sizes, and interfaces that are not there or that the others cannot
// reach. What one rank finds, all throw that have come.
GlooGroup connect_gloo(const GlooRequest& request);

// All members open the key spaces of one name in the same order, so the n-th call of each
// meets the n-th of the others; gives n.
int64_t open_key_space(c10d::Store& store, const std::string& name, int64_t opener);
c10::intrusive_ptr<c10d::Store> key_space(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::string& name, int64_t instance);

}  // namespace fsdp::internal
