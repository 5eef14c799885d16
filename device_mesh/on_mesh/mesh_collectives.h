// The collectives of a mesh: those of each of its dimensions' groups.
#pragma once

#include "device_mesh/collectives/collectives.h"
#include "device_mesh/collectives/words_and_texts.h"
#include "device_mesh/device_mesh.h"

#include <cstdint>
#include <vector>

namespace fsdp::internal {

// Of dimension `dim`. Local.
Collectives collectives_of(const DeviceMesh& mesh, int64_t dim);
// Of all dimensions, in their order: what agree() takes. Local.
std::vector<Collectives> collectives_of(const DeviceMesh& mesh);

}  // namespace fsdp::internal
