// Whether all ranks hold the same whole parameters before each keeps its part.
#pragma once

#include "device_mesh/device_mesh.h"
#include "tensor_parallel/internal/planned_parameters.h"

#include <vector>

namespace fsdp::internal {

// Throws the same ValueError on every rank where names, shapes, dtypes, placements or
// values differ. Reads all values. Collective over the mesh.
void check_agreement(const std::vector<PlannedParameter>& parameters, const DeviceMesh& mesh);

}  // namespace fsdp::internal
