// What is known of a DTensor on every rank alike: its mesh, its placements and its global
// geometry. Immutable, shared.
#pragma once

#include "device_mesh/device_mesh.h"
#include "dtensor/placement.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::internal {

struct DTensorSpec {
  DeviceMesh mesh;
  std::vector<Placement> placements;  // one per mesh dimension
  std::vector<int64_t> shape;         // global
  std::vector<int64_t> stride;        // global

  bool operator==(const DTensorSpec&) const = default;
};
using DTensorSpecPtr = std::shared_ptr<const DTensorSpec>;

// The one shared spec equal to `spec` (while somebody holds it), so that equal specs
// compare by pointer. Throws ValueError for placements that do not fit the mesh or the
// shape.
DTensorSpecPtr intern_spec(DTensorSpec spec);

std::string to_string(const DTensorSpec& spec);

}  // namespace fsdp::internal
