// What a rank does last before its program ends, by name. It is prepared first, so that
// nothing but that collective is left to do.
//
//   const LastCollective last = prepare("all_gather", mesh, {.large = true});
//   last();   // throws where a value is wrong
#pragma once

#include "device_mesh/device_mesh.h"

#include <functional>
#include <string>
#include <vector>

namespace fsdp::testing {

using LastCollective = std::function<void()>;

struct LastOptions {
  bool large = false;       // rows that do not travel with a notice, in memory that is new
  std::string folder = {};  // where checkpoints go
};

// In the order of the table.
const std::vector<std::string>& last_collectives();
// Collective. What it returns may be called again and again; it keeps `mesh`, models and
// tensors.
LastCollective prepare(const std::string& name, const DeviceMesh& mesh, const LastOptions& options);

}  // namespace fsdp::testing
