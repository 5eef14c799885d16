// How a process finds the others of its job: its place by the variables that launchers
// set, and the store at MASTER_ADDR and MASTER_PORT, in which they meet.
//
//   LaunchEnvironment here = internal::parse_launch_environment(internal::process_environment());
//   auto store = internal::connect_rendezvous_store(here, timeout);
#pragma once

#include "device_mesh/process_group.h"

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>

namespace c10d {
class Store;
}

namespace fsdp::internal {

// Looks a variable up; nullopt when it is not set.
using Environment = std::function<std::optional<std::string>(const std::string& name)>;

Environment process_environment();

// Local. The first launcher whose variables are present decides (see LaunchEnvironment).
// Throws ValueError, with the variable's name, its value and what is allowed, for a value
// that is not an integer, a rank outside the world, a port outside 1..65535, or one of a
// pair (rank, size) that is missing.
LaunchEnvironment parse_launch_environment(const Environment& environment);

// Under torchrun the agent already serves the store at MASTER_ADDR:MASTER_PORT, and a
// restarted job must not meet the keys of the attempt before.
struct StoreHost {
  bool served_by_launcher = false;
  std::string key_prefix = {};
};
StoreHost parse_store_host(const Environment& environment);

// The store at MASTER_ADDR and MASTER_PORT. Rank 0 serves it, unless a launcher does.
// Kept for the life of the process, one per address. Returns or throws within `timeout`
// and 4 s. Throws ValueError without MASTER_ADDR, and DistNetworkError that tells apart a
// name that does not resolve, a taken port, nobody there and somebody who does not speak.
c10::intrusive_ptr<c10d::Store> connect_rendezvous_store(const LaunchEnvironment& here,
                                                         std::chrono::milliseconds timeout);
// Whether this process serves that store, or the one that it is a part of, because
// connect_rendezvous_store() made it do so. Local.
bool is_served_here(c10d::Store& store);

}  // namespace fsdp::internal
