// How often the shards of a group have been written, as far as the ranks of one mesh
// dimension must agree on it: a rank that skipped an optimizer step, or wrote alone, goes
// on with shards of another state than the others', which no other check can see. Pure
// integers.
//
// All writes between two gathers are one *run*, however many operators they are: what
// optimizers and programs call within it may differ, as long as every rank that holds a
// part of what was written takes part. A rank with nothing but empty parts may write or
// not. The words of all ranks travel with the gather that ends the run:
//
//   runs.written(holders_of(chunk, grid));   // an operator writes a shard
//   send(runs.writing());
//   ...                                      // the gather; `all` has every rank's word
//   if (WriteRuns::all_took_part(all)) runs.compared(all);
//   else throw ...;                          // on every rank, since all have the same words
#pragma once

#include "fully_shard/transport/packed_layout.h"
#include "fully_shard/transport/shard_grid.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::internal {

// A bit per rank of the group that holds a part of a parameter. With more than 32 ranks
// several share a bit, which is set only if all of them hold a part. The check may then
// miss an error, but it never reports a false one.
using Holders = uint32_t;
// The inner ranks that a gather of this rank's goes to; and, with HFSDP, the outer ranks
// that hold the pieces of its inner shards. chunk: of the places of the grid.
Holders holders_of(const PackedChunk& chunk, const ShardGrid& grid);
Holders holders_of_pieces(const PackedChunk& chunk, const ShardGrid& grid);

class WriteRuns {
 public:
  // A part of what these ranks hold is written here.
  void written(Holders holders) { writing_ |= holders; }
  // For the next gather: who holds what the run that goes on wrote; 0: it wrote nothing.
  Holders writing() const { return writing_; }
  // The run ends: every rank has heard the words of all, by rank. Whether anybody wrote.
  bool compared(const std::vector<Holders>& all);

  // The first rank that wrote nothing in a run in which others wrote what it holds a part
  // of; none: all took part. The same answer on every rank.
  static std::optional<int64_t> silent_rank(const std::vector<Holders>& all);
  static bool all_took_part(const std::vector<Holders>& all) { return !silent_rank(all); }
  // How often each rank has written: "3 times on ranks 0, 2; 2 times on rank 1". ranks:
  // their numbers in the job.
  std::string describe(const std::vector<Holders>& all, const std::vector<int64_t>& ranks) const;

 private:
  uint64_t ended_ = 0;  // runs, the same number on every rank
  Holders writing_ = 0;
};

}  // namespace fsdp::internal
