// Which values of a group are newest: those in its shards, or those in its unsharded
// copy. Pure integers.
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
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <vector>

namespace fsdp::internal {

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

}  // namespace fsdp::internal
