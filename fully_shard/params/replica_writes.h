// Whether replicas of a unit wrote its shards alike: a replica that skipped an optimizer
// step, or wrote alone, goes on with another model than the others, and its own gathers,
// among ranks that did the same, can not see it (write_runs.h). Pure integers.
//
// All writes between two sums of gradients over the replicas are one, however many, and
// whatever a replica gathers in between: one may evaluate alone. What a replica wrote,
// all its ranks know by the gather that ended the run, also those with empty shards. The
// words of all replicas travel with the sum:
//
//   writes.run_ended();                      // a gather after writes
//   writes.used();                           // a forward that is to be trained with
//   send(writes.word());
//   ...                                      // the sum; `all` has every replica's word
//   if (ReplicaWrites::agree(all)) writes.compared(all);
//   else throw ...;                          // on every rank, since all have the same words
#pragma once

#include <cstdint>
#include <vector>

namespace fsdp::internal {

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
