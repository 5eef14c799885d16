// The collectives of a mesh: those of each of its dimensions' groups.
#pragma once

#include "device_mesh/collectives/collectives.h"
#include "device_mesh/collectives/words_and_texts.h"
#include "device_mesh/device_mesh.h"

#include <cstdint>
#include <vector>

namespace fsdp::internal {

// Of dimension `dim`. Local.
inline Collectives collectives_of(const DeviceMesh& mesh, int64_t dim) {
  return Collectives::of(mesh.group(dim), mesh.device_type());
}
// Of all dimensions, in their order: what agree() takes. Local.
inline std::vector<Collectives> collectives_of(const DeviceMesh& mesh) {
  std::vector<Collectives> dims;
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim) dims.push_back(collectives_of(mesh, dim));
  return dims;
}

}  // namespace fsdp::internal
