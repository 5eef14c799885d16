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
// All offsets are in bytes. Where rows are cut evenly, as torch.chunk cuts them or atoms
// of some rows (Shard::unit), offsets are the same on every rank: a chunk has room for
// the largest part, ceil(atoms / world) atoms of every block, and a smaller or empty part
// leaves its tail unused. A ragged cut says how many rows each rank has (RaggedShard,
// Owned); its chunks are as long as that rank's part, so in a layout with one the offsets
// differ between ranks, and rows are as long as the longest rank needs. Every chunk
// starts on an alignment boundary.
#pragma once

#include "dtensor/placement.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace fsdp::internal {

inline constexpr int64_t kAlignment = 64;  // bytes, as LibTorch's allocators align

// A contiguous parameter, as the dimension that is cut sees it.
struct ShardExtent {
  int64_t rows = 0;       // size of that dimension
  int64_t row_bytes = 0;  // bytes of one index of it
  int64_t blocks = 1;     // the product of the sizes before it
  // How it is cut: unit and local_units count, and divide the rows.
  Shard cut = {};

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

// Where ranks differ.
struct RaggedChunk {
  std::vector<int64_t> bounds;   // of the rows: rank r has [bounds[r], bounds[r + 1])
  std::vector<int64_t> offsets;  // of the chunk in the row of each rank
};

struct PackedChunk {
  int64_t offset = 0;  // of this chunk in a row, where it is the same on every rank
  ShardExtent extent = {};
  int64_t capacity_rows = 0;  // of the largest part
  int64_t whole_offset = 0;   // in memory of all ranks (Arrangement::kCommon)
  // Null: all ranks alike.
  std::shared_ptr<const RaggedChunk> ragged = nullptr;

  bool is_even() const { return ragged == nullptr; }
  bool has_ragged_rows() const { return extent.cut.local_units.has_value(); }
  int64_t capacity_bytes() const { return extent.blocks * capacity_rows * extent.row_bytes; }
  int64_t offset_on(int64_t rank) const {
    return is_even() ? offset : ragged->offsets[static_cast<size_t>(rank)];
  }
  // What it takes of the row of a rank.
  int64_t room(int64_t rank) const { return has_ragged_rows() ? length(rank) : capacity_bytes(); }
  // Of each block: [first_row, first_row + rows).
  int64_t first_row(int64_t rank) const {
    return is_even() ? std::min(rank * capacity_rows, extent.rows)
                     : ragged->bounds[static_cast<size_t>(rank)];
  }
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
  // Chunks begin at multiples of `alignment` bytes, itself one of kAlignment. REQUIRES:
  // local_units of an extent are of `world` ranks, or of an owner among them.
  PackedLayout(const std::vector<ShardExtent>& extents, int64_t world,
               int64_t alignment = kAlignment);

  int64_t row_bytes() const { return row_bytes_; }  // a multiple of the alignment
  // How many bytes at the start of each rank's row are used, in multiples of that. Empty
  // if every row is fully used.
  const std::vector<int64_t>& lengths() const { return lengths_; }
  bool is_even() const { return is_even_; }  // no cut is ragged
  const PackedChunk& chunk(int64_t index) const { return chunks_[static_cast<size_t>(index)]; }
  int64_t size() const { return static_cast<int64_t>(chunks_.size()); }
  // The size of the memory that a rank has in this arrangement (kRow), or all ranks
  // (kCommon).
  int64_t bytes(Arrangement arrangement) const {
    return arrangement == Arrangement::kRow ? row_bytes_ : common_bytes_;
  }
  // The size of a whole parameter in kCommon.
  int64_t whole_bytes(int64_t index) const;
  int64_t offset(Arrangement arrangement, int64_t index, int64_t rank) const {
    const auto& chunk = this->chunk(index);
    if (arrangement == Arrangement::kRow) return chunk.offset_on(rank);
    const auto rows = chunk.has_ragged_rows() ? chunk.first_row(rank) : rank * chunk.capacity_rows;
    return chunk.whole_offset + rows * chunk.extent.blocks * chunk.extent.row_bytes;
  }
  // Whether chunks one behind the other are the whole parameter, for all parameters.
  bool chunks_make_wholes() const;

 private:
  int64_t aligned(int64_t bytes) const {
    return (bytes + alignment_ - 1) / alignment_ * alignment_;
  }
  void pack_evenly();
  void pack_by_rank();
  void find_lengths();
  int64_t end_of_row(int64_t rank) const;

  int64_t world_, alignment_;
  std::vector<PackedChunk> chunks_;
  bool is_even_ = true;
  int64_t row_bytes_ = 0, common_bytes_ = 0;
  std::vector<int64_t> lengths_;
};

int64_t align_up(int64_t bytes);

// The ranks that hold the parts of a unit's parameters. Of a mesh of one dimension, and
// of hybrid sharding, they are those of the dimension that shards. With HFSDP
// (Outer::kShardOptimizer) each of their parts, the inner shard, is cut once more,
// evenly, over the outer dimension. Pure integers.
//
//   inner shards      | 0             | 1             |     over 2 ranks
//   their pieces      | 0,0   | 0,1   | 1,0   | 1,1   |     over 2 outer ranks
//   place             | 0     | 1     | 2     | 3     |
struct ShardGrid {
  int64_t inner_ranks = 1, inner_rank = 0;
  int64_t outer_ranks = 1, outer_rank = 0;  // of one rank: inner shards are not cut

  bool has_pieces() const { return outer_ranks > 1; }
  int64_t count() const { return inner_ranks * outer_ranks; }
  int64_t place_of(int64_t inner, int64_t outer) const { return inner * outer_ranks + outer; }
  int64_t place() const { return place_of(inner_rank, outer_rank); }  // of this rank
};

// `extents` as a layout of grid.count() ranks cuts them, by place. REQUIRES: an extent
// has its cut over the inner ranks.
std::vector<ShardExtent> cut_over(std::vector<ShardExtent> extents, const ShardGrid& grid);

// Where the bytes of `piece` lie in those of `shard`, of the same parameter, packed. The
// ranks of both. REQUIRES: the rows of the piece are among those of the shard.
struct ChunkOfRank {
  const PackedChunk& chunk;
  int64_t rank;
};
ShardPart place_within(const ChunkOfRank& piece, const ChunkOfRank& shard);

}  // namespace fsdp::internal
