// The ranks that hold the parts of a unit's parameters. Of a mesh of one dimension, and
// of hybrid sharding, they are those of the dimension that shards. With HFSDP
// (Outer::kShardOptimizer) each of their parts, the inner shard, is cut once more,
// evenly, over the outer dimension. Pure integers.
//
//   inner shards      | 0             | 1             |     over 2 ranks
//   their pieces      | 0,0   | 0,1   | 1,0   | 1,1   |     over 2 outer ranks
//   place             | 0     | 1     | 2     | 3     |
#pragma once

#include "fully_shard/transport/packed_layout.h"

#include <cstdint>
#include <vector>

namespace fsdp::internal {

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
