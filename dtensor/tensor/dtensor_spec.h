// What is known of a DTensor on every rank alike: its mesh, its placements and its global
// geometry. A value that is cheap to copy: what it would be otherwise is another spec.
#pragma once

#include "device_mesh/device_mesh.h"
#include "dtensor/layout/tensor_layout.h"
#include "dtensor/placement.h"

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::internal {

class DTensorSpec {
 public:
  // Throws ValueError for placements that do not fit the mesh or the shape.
  DTensorSpec(DeviceMesh mesh, std::vector<Placement> placements, std::vector<int64_t> shape,
              std::vector<int64_t> stride);
  // Contiguous.
  DTensorSpec(DeviceMesh mesh, std::vector<Placement> placements,
              const std::vector<int64_t>& shape);
  // REQUIRES: the layout is over a mesh of that shape.
  DTensorSpec(DeviceMesh mesh, TensorLayout layout)
      : mesh_(std::move(mesh)), layout_(std::move(layout)) {}

  const DeviceMesh& mesh() const { return mesh_; }
  const TensorLayout& layout() const { return layout_; }
  const std::vector<Placement>& placements() const { return layout_.placements(); }
  const std::vector<int64_t>& shape() const { return layout_.shape(); }
  const std::vector<int64_t>& stride() const { return layout_.stride(); }

  bool operator==(const DTensorSpec& other) const {
    return layout_ == other.layout_ && mesh_ == other.mesh_;
  }

  DTensorSpec with_placements(std::vector<Placement> placements) const;
  DTensorSpec with_geometry(std::vector<int64_t> shape, std::vector<int64_t> stride) const;
  DTensorSpec with_shape(std::vector<int64_t> shape) const;  // contiguous
  DTensorSpec without_partials() const;                      // Replicate instead
  DTensorSpec replicated() const;                            // on all mesh dimensions
  DTensorSpec simplified() const;  // with its cuts written simplest (shard_layout.h)

  bool has_partial() const { return layout_.has_partial(); }
  bool has_shard() const { return layout_.has_shard(); }
  // Whether a mesh dimension of more than one rank shards tensor dimension `dim`.
  bool is_cut(int64_t dim) const { return layout_.is_cut(dim); }

  // What this rank holds.
  std::vector<LocalBox> local_boxes() const { return layout_.local_boxes(mesh_.coordinate()); }
  std::vector<int64_t> local_shape() const { return layout_.local_shape(mesh_.coordinate()); }

 private:
  DeviceMesh mesh_;
  TensorLayout layout_;
};

// `placements` with every Partial turned into Replicate.
std::vector<Placement> without_partials(std::vector<Placement> placements);

std::string to_string(const DTensorSpec& spec);

}  // namespace fsdp::internal
