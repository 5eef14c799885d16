// Whether all ranks hold the same whole parameters before each keeps its part.
#pragma once

#include "device_mesh/device_mesh.h"
#include "tensor_parallel/internal/planned_parameters.h"

#include <cstdint>
#include <vector>

namespace fsdp::internal {

// Throws the same ValueError on every rank where names, shapes, dtypes, placements or
// values differ. Else a number that tells these parameters from those of other models on
// the mesh, the same on every rank. Reads all values. Collective over the mesh.
uint32_t check_agreement(const std::vector<PlannedParameter>& parameters, const DeviceMesh& mesh);

}  // namespace fsdp::internal
