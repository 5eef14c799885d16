// Where each parameter's dim-0 chunk lies in a rank's row of a packed collective buffer.
// Pure integers.
//
// All offsets are in bytes and the same on every rank. A row holds one chunk of capacity
// ceil(rows / world) per parameter, each starting on an alignment boundary; a short or
// empty chunk leaves its tail unused.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsdp::internal {

inline constexpr int64_t kAlignment = 64;  // bytes, as LibTorch's allocators align

struct DimZeroExtent {
  int64_t rows = 0;       // size of dimension 0
  int64_t row_bytes = 0;  // bytes of one index of dimension 0
};

struct PackedChunk {
  int64_t offset = 0;          // of this chunk in a row
  int64_t capacity_bytes = 0;  // ceil(rows / world) * row_bytes
  int64_t total_bytes = 0;     // rows * row_bytes: the whole parameter

  // The bytes of the parameter that belong to `rank`: [first, first + length) of the
  // contiguous whole.
  int64_t first(int64_t rank) const { return std::min(rank * capacity_bytes, total_bytes); }
  int64_t length(int64_t rank) const { return first(rank + 1) - first(rank); }
};

class PackedLayout {
 public:
  PackedLayout(const std::vector<DimZeroExtent>& extents, int64_t world);

  int64_t row_bytes() const { return row_bytes_; }  // a multiple of kAlignment
  const PackedChunk& chunk(int64_t index) const { return chunks_[static_cast<size_t>(index)]; }
  int64_t size() const { return static_cast<int64_t>(chunks_.size()); }

 private:
  std::vector<PackedChunk> chunks_;
  int64_t row_bytes_ = 0;
};

int64_t align_up(int64_t bytes);

}  // namespace fsdp::internal
