// What is known of a DTensor on every rank alike: its mesh, its placements and its global
// geometry. A value: what it would be otherwise is another spec.
#pragma once

#include "device_mesh/device_mesh.h"
#include "dtensor/internal/shard_layout.h"
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

  DTensorSpec with_placements(std::vector<Placement> placements) const;
  DTensorSpec with_geometry(std::vector<int64_t> shape, std::vector<int64_t> stride) const;
  DTensorSpec with_shape(std::vector<int64_t> shape) const;  // contiguous
  DTensorSpec without_partials() const;                      // Replicate instead
  DTensorSpec replicated() const;                            // on all mesh dimensions

  bool has_partial() const;
  // Whether a mesh dimension of more than one rank shards tensor dimension `dim`.
  bool is_cut(int64_t dim) const;

  // What this rank holds, as offsets and lengths in the global tensor. Throws
  // NotImplementedError where a cut has blocks, which leave no box.
  std::vector<Chunk> local_box() const;
  std::vector<int64_t> local_shape() const;
};
using DTensorSpecPtr = std::shared_ptr<const DTensorSpec>;

// Which tensor dimension each mesh dimension cuts; kNotSharded for none.
std::vector<int64_t> shard_dims(const std::vector<Placement>& placements);

// `spec` with its cuts written simplest (shard_layout.h). Throws as intern_spec.
DTensorSpec simplified(DTensorSpec spec);

// `placements` with every Partial turned into Replicate.
std::vector<Placement> without_partials(std::vector<Placement> placements);

// The one shared spec equal to `spec` (while somebody holds it), so that equal specs
// compare by pointer. Throws ValueError for placements that do not fit the mesh or the
// shape.
DTensorSpecPtr intern_spec(DTensorSpec spec);

std::string to_string(const DTensorSpec& spec);

}  // namespace fsdp::internal
