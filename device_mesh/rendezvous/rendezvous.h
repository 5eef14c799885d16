// How a process learns its place in the job: the variables that launchers set. No
// tensors, no c10d, no I/O.
//
//   LaunchEnvironment here = internal::parse_launch_environment(internal::process_environment());
#pragma once

#include "device_mesh/process_group.h"

#include <functional>
#include <optional>
#include <string>

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

}  // namespace fsdp::internal
