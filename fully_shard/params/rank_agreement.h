// What the ranks of a group must have alike, and how they find that they differ: the
// values that all were given (agreed_values.h), the writes to shards between two gathers
// (write_runs.h), and those of replicas between two sums of gradients (replica_writes.h).
// Words of it travel with gathers and sums, so nothing is sent for it unless ranks
// differ.
#pragma once

#include "fully_shard/params/agreed_values.h"
#include "fully_shard/params/group_info.h"
#include "fully_shard/params/replica_writes.h"
#include "fully_shard/params/shard_buffer.h"
#include "fully_shard/params/unsharded_state.h"
#include "fully_shard/params/write_runs.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::internal {

class RankAgreement {
 public:
  // All outlive it.
  RankAgreement(const GroupInfo& info, const std::vector<FSDPParam>& params,
                const ShardBuffer& shards);
  RankAgreement(const RankAgreement&) = delete;

  AgreedValues& values() { return values_; }
  // This rank's shard of parameter `index` is written, as an operation on all ranks.
  void shard_written(int64_t index);
  // The shards lie otherwise now.
  void shards_replaced();
  // A forward that records gradients computes with the newest values.
  void used_in_training() { replica_writes_.used(); }

  // What travels with the next gather, and with a sum of gradients over the replicas.
  NoticeWords words() const;
  NoticeWords word_for_replicas() const;
  // HFSDP: the words that travel with the outer gather of pieces. hear_pieces() gets
  // those of the outer ranks (empty: none travelled) and returns false if one of them
  // skipped a write. The next words() then tell the inner ranks, so that every rank of
  // the mesh throws.
  NoticeWords words_for_pieces() const { return {.writing = piece_runs_.writing()}; }
  bool hear_pieces(const std::vector<NoticeWords>& of_outer_ranks);
  // Throws ValueError, on all ranks alike, where the ranks that were gathered from, or
  // the replicas, differ. Collective where they do; over the replicas, too, where all
  // ranks have something to compare.
  void check(const Gathered& gathered);
  // Where gathers bring no words and the ranks tell each other on the host instead, once
  // per backward (step/exchange_after_backward.h): what is compared of all gathers since
  // the last time; nothing where there was none.
  NoticeWords words_since_exchange() const { return was_gathered_ ? words() : NoticeWords{}; }
  // What check() does with the values, for ranks along a dimension of the mesh of which
  // some have another word; and with the writes of the ranks that shard. Both throw as it
  // does; the first is collective over the dimension.
  void check_values_along(int64_t mesh_dim);
  void check_writes_since_exchange(const std::vector<NoticeWords>& of_shards);
  // All that was to be compared was.
  void exchanged();
  // Throws ValueError, on all ranks alike, where one replica wrote the shards since the
  // last such sum and another did not. of_replicas: the words of all, by replica.
  void check_replica_writes(const std::vector<NoticeWords>& of_replicas);

 private:
  void check_values(const std::vector<NoticeWords>& of_shards);
  void check_values_read(const std::vector<std::vector<uint64_t>>& tables) const;
  std::vector<std::string> names() const;
  void check_writes(const std::vector<NoticeWords>& of_shards);
  void check_writes_of_pieces(const std::vector<NoticeWords>& of_shards) const;
  [[noreturn]] void report_silent(int64_t inner_rank, int64_t outer_rank) const;
  std::string difference_along(int64_t mesh_dim);
  [[noreturn]] void report_difference(const std::string& what) const;
  [[noreturn]] void report_difference_in(int64_t replica) const;
  const std::string& first_name() const { return params_.front().name(); }

  const GroupInfo& info_;
  const std::vector<FSDPParam>& params_;
  const ShardBuffer& shards_;
  AgreedValues values_;
  WriteRuns write_runs_;
  ReplicaWrites replica_writes_;
  std::vector<Holders> holders_;  // by parameter
  // HFSDP: the same among the outer ranks, and one of them that did not write the pieces
  // of this rank's inner shards, which others wrote.
  WriteRuns piece_runs_;
  std::vector<Holders> piece_holders_;
  std::optional<int64_t> silent_outer_rank_;
  bool was_gathered_ = false;  // since the ranks told each other on the host
};

}  // namespace fsdp::internal
