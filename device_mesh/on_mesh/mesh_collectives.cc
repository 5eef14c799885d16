#include "device_mesh/on_mesh/mesh_collectives.h"

namespace fsdp::internal {

Collectives collectives_of(const DeviceMesh& mesh, int64_t dim) {
  return Collectives::of(mesh.group(dim), mesh.device_type());
}

std::vector<Collectives> collectives_of(const DeviceMesh& mesh) {
  std::vector<Collectives> dims;
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim) dims.push_back(collectives_of(mesh, dim));
  return dims;
}

}  // namespace fsdp::internal
