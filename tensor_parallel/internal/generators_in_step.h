// The random numbers of ranks that compute one model must be the same ones.
#pragma once

#include "device_mesh/device_mesh.h"

namespace fsdp::internal {

// Gives LibTorch's default generator of the mesh's device the state that it has on
// coordinate 0, on every rank that does not share that generator. Collective over the
// mesh.
void bring_generators_in_step(const DeviceMesh& mesh);

}  // namespace fsdp::internal
