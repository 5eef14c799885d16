// Where the ranks of a job run.
#pragma once

#include "device_mesh/device_mesh.h"

#include <cstdint>

namespace examples {

struct Hosts {
  int64_t count = 1;
  int64_t ranks_here = 1;  // on this host, with this one
};

// By the names of hosts. Collective over the mesh.
Hosts hosts_of(const fsdp::DeviceMesh& mesh);

}  // namespace examples
