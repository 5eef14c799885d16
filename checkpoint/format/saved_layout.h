// How a tensor lies over the ranks of the job that saves it, and which rank writes which
// box of it, so that no byte is written twice. Arithmetic only, the same on every rank.
#pragma once

#include "checkpoint/format/box.h"
#include "dtensor/placement.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

// A mesh and, per mesh dimension, how it cuts the tensor; Replicate: copies.
struct SavedLayout {
  std::vector<int64_t> mesh_shape;
  std::vector<std::string> mesh_names;
  std::vector<int64_t> ranks;  // row-major
  std::vector<Placement> placements;

  bool operator==(const SavedLayout&) const = default;
};

// "R", "S(0)", "S(0, outer=3, unit=8)" or "S(0, local_units=[3, 0, 1])", of placements
// that a layout may have, and back, which throws std::runtime_error for any other text.
std::string placement_text(const Placement& placement);
Placement placement_from(const std::string& text);

// Of a DTensor; a plain tensor is a copy on each of `world_size` ranks. Throws ValueError
// naming `name` for Partial placements.
SavedLayout layout_of(const at::Tensor& tensor, int64_t world_size, const std::string& name);

// The number of copies: the product of the mesh dimensions that do not cut.
int64_t replica_count(const SavedLayout& layout);

struct WrittenBox {
  int64_t rank = 0;
  int64_t number = 0;  // among the boxes of the tensor that the rank writes
  Box box;
  std::vector<int64_t> begin;  // where it begins in the rank's part; empty: it is the part
};
// The boxes that copy `replica` writes: together the whole tensor, each element once. One
// empty box, of the first rank, for a tensor without elements.
std::vector<WrittenBox> written_boxes(const SavedLayout& layout, const std::vector<int64_t>& shape,
                                      int64_t replica);

}  // namespace fsdp::internal::checkpoint
