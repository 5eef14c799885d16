// Which rank computes with which tensor, and what it collects for that of its row of
// ranks, or hands back to it. No torch here.
//
//   PartsAlong rows(layout, /*mesh_dim=*/0, coordinate);
//   rows.whole_shape();    // what the row of ranks has together
//   rows.shape_at(2);      // what coordinate 2 of the row has of it
#pragma once

#include "dtensor/layout/shard_layout.h"
#include "dtensor/layout/tensor_layout.h"

#include <cstdint>
#include <vector>

namespace fsdp::internal {

// Deals out work, so that the ranks with the most have as little as possible: the longest
// first, to the rank that has least so far (Graham, "Bounds on multiprocessing timing
// anomalies", 1969: at most 4/3 of the best). Ties go by position, so all ranks decide
// alike without sending.
class Owners {
 public:
  explicit Owners(int64_t ranks) : loads_(static_cast<size_t>(ranks), 0.0) {}

  // By position in `costs`. What was dealt out before counts.
  std::vector<int64_t> assign(const std::vector<double>& costs);
  // The sum of each rank's costs.
  const std::vector<double>& loads() const { return loads_; }

 private:
  std::vector<double> loads_;
};

// How a tensor lies along one mesh dimension once those behind it are undone.
class PartsAlong {
 public:
  // Of the row of ranks along `mesh_dim` in which the rank at `coordinate` is. REQUIRES:
  // no Partial placement.
  PartsAlong(const TensorLayout& layout, size_t mesh_dim, const std::vector<int64_t>& coordinate);

  // Each has a part of its own; else all have the same.
  bool is_cut() const { return is_cut_; }
  int64_t ranks() const { return static_cast<int64_t>(shapes_.size()); }
  // As the mesh dimensions in front of this one cut the tensor.
  const std::vector<int64_t>& whole_shape() const { return whole_shape_; }
  const std::vector<int64_t>& shape_at(int64_t index) const {
    return shapes_[static_cast<size_t>(index)];
  }
  int64_t elements_at(int64_t index) const;
  // Where that part lies in the whole.
  const std::vector<LocalBox>& boxes_at(int64_t index) const {
    return boxes_[static_cast<size_t>(index)];
  }

 private:
  bool is_cut_;
  std::vector<int64_t> whole_shape_;
  std::vector<std::vector<int64_t>> shapes_;
  std::vector<std::vector<LocalBox>> boxes_;
};

}  // namespace fsdp::internal
