// Where each parameter's chunk lies in a rank's row of a packed collective buffer, and
// which bytes of the whole parameter it holds. Pure integers.
//
// A parameter is cut along one of its dimensions. In memory the rows of that dimension
// come in blocks, one per index of the dimensions before it; a rank has the same rows of
// every block, and packs them one block behind the other. Of a contiguous [2, 3, 2] cut
// along dimension 1 over 2 ranks, two rows for the first:
//
//   whole    | a a b b c c | d d e e f f |     2 blocks of 3 rows
//   chunks   | a a b b d d e e |   | c c f f - - - - |
//
// All offsets are in bytes and the same on every rank. A chunk has room for the largest
// part, ceil(rows / world) rows of every block, and starts on an alignment boundary; a
// smaller or empty part leaves its tail unused.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsdp::internal {

inline constexpr int64_t kAlignment = 64;  // bytes, as LibTorch's allocators align

// A contiguous parameter, as the dimension that is cut sees it.
struct ShardExtent {
  int64_t rows = 0;       // size of that dimension
  int64_t row_bytes = 0;  // bytes of one index of it
  int64_t blocks = 1;     // the product of the sizes before it

  int64_t nbytes() const { return blocks * rows * row_bytes; }
};

// The bytes of a whole parameter that are one rank's: `runs` of `run_bytes` each, the
// first at `first`, each next one `stride` later. In the part they lie one behind the
// other.
struct ShardPart {
  int64_t first = 0;
  int64_t run_bytes = 0;
  int64_t runs = 0;
  int64_t stride = 0;

  int64_t nbytes() const { return runs * run_bytes; }
  int64_t end() const { return first + (runs - 1) * stride + run_bytes; }  // of the last run
  // visit(offset in the whole, offset in the part) for each run, in order.
  template <class Visit>
  void for_each_run(const Visit& visit) const {
    for (int64_t i = 0; i < runs; ++i) visit(first + i * stride, i * run_bytes);
  }
};

struct PackedChunk {
  int64_t offset = 0;  // of this chunk in a row
  ShardExtent extent = {};
  int64_t capacity_rows = 0;  // ceil(rows / world)

  int64_t capacity_bytes() const { return extent.blocks * capacity_rows * extent.row_bytes; }
  // Of each block, as torch.chunk cuts: [first_row, first_row + rows).
  int64_t first_row(int64_t rank) const { return std::min(rank * capacity_rows, extent.rows); }
  int64_t rows(int64_t rank) const { return first_row(rank + 1) - first_row(rank); }
  // One run where the part is contiguous in the whole: a cut along dimension 0, or a
  // single rank.
  ShardPart part(int64_t rank) const;
  int64_t length(int64_t rank) const { return part(rank).nbytes(); }
};

// Where one rank has its chunks.
enum class Arrangement : uint8_t {
  kRow,     // in a row of its own
  kCommon,  // in memory of all ranks, where each parameter's chunks lie one behind the other
};

class PackedLayout {
 public:
  PackedLayout(const std::vector<ShardExtent>& extents, int64_t world);

  int64_t row_bytes() const { return row_bytes_; }  // a multiple of kAlignment
  const PackedChunk& chunk(int64_t index) const { return chunks_[static_cast<size_t>(index)]; }
  int64_t size() const { return static_cast<int64_t>(chunks_.size()); }
  // Of that memory, and of a chunk there.
  int64_t bytes(Arrangement arrangement) const {
    return arrangement == Arrangement::kRow ? row_bytes_ : world_ * row_bytes_;
  }
  int64_t offset(Arrangement arrangement, int64_t index, int64_t rank) const {
    const auto& chunk = this->chunk(index);
    if (arrangement == Arrangement::kRow) return chunk.offset;
    return world_ * chunk.offset + rank * chunk.capacity_bytes();
  }
  // Whether chunks one behind the other are the whole parameter, for all parameters.
  bool chunks_make_wholes() const;

 private:
  int64_t world_;
  std::vector<PackedChunk> chunks_;
  int64_t row_bytes_ = 0;
};

int64_t align_up(int64_t bytes);

}  // namespace fsdp::internal
