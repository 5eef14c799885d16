// What was written to the shards of a group, and where: whether the shards or the
// unsharded copy are newest (ShardWrites), and whether the ranks that hold them
// (WriteRuns), and their replicas (ReplicaWrites), wrote alike. Pure integers.
#pragma once

#include "fully_shard/transport/packed_layout.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace fsdp::internal {

// Which values of a group are newest: those in its shards, or those in its unsharded
// copy.
//
// Every write to the shards begins a new generation of them. The copy remembers the
// generation that it was gathered from, and a graph the one that it was recorded with.
// Generations count write calls, never what was written, so that they are the same on
// every rank.
//
//   event             generation   copy holds     dirty
//   copy_filled()     -            generation     none
//   copy_emptied()    -            nothing        none
//   shard_written()   + 1          -              REQUIRES none
//   copy_written(i)   -            -              + i
//   write_back()      + 1          -              none (returned)
//   copy_discarded()  -            nothing        none
//
// A copy that does not hold the current generation is stale: it must not be read.
class ShardWrites {
 public:
  // The shards are about to be written by an operator, or were written through an alias.
  // REQUIRES: !is_dirty().
  void shard_written();
  void copy_filled();
  void copy_emptied();
  void copy_written(size_t param) { dirty_.insert(param); }
  // What was written to the copy is to be forgotten, and the copy with it.
  void copy_discarded();
  // The parameters whose values go from the copy to the shards now, ascending.
  std::vector<size_t> write_back();
  // A forward records a graph over the current values.
  void graph_recorded() { graph_ = generation_; }
  // The backward through it is done.
  void graph_done() { graph_.reset(); }

  bool is_stale() const { return copy_ != generation_; }
  bool is_dirty() const { return !dirty_.empty(); }
  bool is_dirty(size_t param) const { return dirty_.contains(param); }
  bool graph_is_current() const { return !graph_ || graph_ == generation_; }

 private:
  uint64_t generation_ = 0;
  std::optional<uint64_t> copy_;   // the generation that the copy holds
  std::optional<uint64_t> graph_;  // the generation that the last graph was recorded with
  std::set<size_t> dirty_;         // parameters written in the copy, not yet in the shards
};

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

// Whether replicas of a unit wrote its shards alike: a replica that skipped an optimizer
// step, or wrote alone, goes on with another model than the others, and its own gathers,
// among ranks that did the same, can not see it (WriteRuns). Pure integers.
//
// All writes between two sums of gradients over the replicas count as one. Gathers in
// between do not matter, so that a replica may evaluate alone. What a replica wrote, all
// its ranks know by the gather that ended the run, also those with empty shards. The
// words of all replicas travel with the sum:
//
//   writes.run_ended();                      // a gather after writes
//   writes.used();                           // a forward that is to be trained with
//   send(writes.word());
//   ...                                      // the sum; `all` has every replica's word
//   if (ReplicaWrites::agree(all)) writes.compared(all);
//   else throw ...;                          // on every rank, since all have the same words
class ReplicaWrites {
 public:
  // A shard is written here: what was used is old.
  void written() { used_ = false; }
  // A gather brought what ranks of this replica wrote.
  void run_ended() { wrote_ = true; }
  // A forward that records gradients computes with the newest values.
  void used() { used_ = true; }

  // Of a replica that wrote; that did not; that does not know, since it neither gathered
  // nor used the unit (reduce_unused_params).
  enum Word : uint64_t { kUnknown = 0, kDidNot = 1, kWrote = 2 };
  uint64_t word() const { return wrote_ ? kWrote : used_ ? kDidNot : kUnknown; }
  // False where one replica wrote and another did not. The same answer on every rank.
  static bool agree(const std::vector<uint64_t>& all);
  // Where all know, what comes from now on is compared the next time.
  void compared(const std::vector<uint64_t>& all);

 private:
  bool wrote_ = false, used_ = false;  // since the replicas were compared
};

}  // namespace fsdp::internal
