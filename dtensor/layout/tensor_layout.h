// How a tensor of global shape lies over a mesh: all that every rank knows alike of a
// DTensor but the mesh itself.
//
//   TensorLayout rows({.mesh_shape = {2}, .placements = {Shard{0}}, .shape = {5, 4},
//                      .stride = {4, 1}});
//   rows.local_shape(/*coordinate=*/{1});   // {2, 4}
//
// An immutable value that costs a pointer: equal layouts share one record while there are
// any, so they compare by address. Threads may share them. No torch here.
#pragma once

#include "dtensor/layout/shard_layout.h"
#include "dtensor/placement.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::internal {

class TensorLayout {
 public:
  struct Facts {
    std::vector<int64_t> mesh_shape;
    std::vector<Placement> placements;  // one per mesh dimension
    std::vector<int64_t> shape;         // global
    std::vector<int64_t> stride;        // global

    bool operator==(const Facts&) const = default;
  };

  // Throws std::invalid_argument, which says why, for placements that do not fit the mesh
  // or the shape.
  explicit TensorLayout(Facts facts);

  const std::vector<int64_t>& mesh_shape() const { return facts_->mesh_shape; }
  const std::vector<Placement>& placements() const { return facts_->placements; }
  const std::vector<int64_t>& shape() const { return facts_->shape; }
  const std::vector<int64_t>& stride() const { return facts_->stride; }

  bool has_partial() const;
  bool has_shard() const;
  // Whether a mesh dimension of more than one rank shards tensor dimension `dim`.
  bool is_cut(int64_t dim) const;

  // What the rank at `coordinate` holds.
  std::vector<LocalBox> local_boxes(const std::vector<int64_t>& coordinate) const;
  std::vector<int64_t> local_shape(const std::vector<int64_t>& coordinate) const;

  // The same one for equal layouts, while one lives.
  const void* id() const { return facts_.get(); }
  bool operator==(const TensorLayout& other) const { return facts_ == other.facts_; }

 private:
  std::shared_ptr<const Facts> facts_;
};

// "shape [5, 4] placed (Shard(0))"
std::string to_string(const TensorLayout& layout);

}  // namespace fsdp::internal
