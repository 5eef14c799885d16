// What the ranks of a group must have alike, and how they find that they differ: the
// values that all were given (AgreedValues), the writes to shards between two gathers,
// and those of replicas between two sums of gradients (shard_writes.h). Words of it
// travel with gathers and sums, so nothing is sent for it unless ranks differ. Where
// ranks read each other's shards, that finds writes that differ
// (transport/shard_versions.h).
#pragma once

#include "fully_shard/params/group_info.h"
#include "fully_shard/params/shard_buffer.h"
#include "fully_shard/params/shard_writes.h"
#include "fully_shard/params/unsharded_params.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fsdp {
class DeviceMesh;
}

namespace fsdp::internal {

// Values that every rank must have alike, though each keeps its own part only: the
// parameters as they were when fully_shard met them, and, since the last gather, whole
// plain values that were copied into them, plain tensors without dimensions that they
// were written with, and what was written to members. Each is known by a hash; all of a
// group's travel in one word with its next gather, and where the words differ one more
// exchange tells which parameter it is.
//
// A write to a member or a shard invalidates the hash of that parameter's start values. A
// write of the whole parameter also invalidates the hashes of what was copied into it and
// of what it was written with. A hash of zero means "not recorded" and matches anything,
// because a rank without a part of the parameter need not write it, and ranks may write
// by other operators. Everything but difference() is local.
class AgreedValues {
 public:
  // Stands for the word of ranks that found theirs to differ.
  static constexpr uint64_t kDiffer = 1;

  explicit AgreedValues(size_t param_count) : params_(param_count) {}

  // The whole value of a parameter; one without (meta, no bytes) has none.
  void note_start(size_t param, const FSDPParam& of, const at::Tensor& whole);
  // A value that was copied before still has to be alike, because a part of it may be
  // left.
  void note_write(size_t param) { params_[param].start_values = 0; }
  void note_overwrite(size_t param) {
    Hashes& hashes = params_[param];
    hashes.start_values = hashes.copied = hashes.factors = 0;
  }
  // The whole value that was copied into the parameter, by its hash; after
  // note_overwrite().
  void note_copy(size_t param, uint64_t hash) { params_[param].copied = hash; }
  // Tensors without dimensions that the parameter is written with.
  void note_factors(size_t param, uint64_t hash);
  // What a member's full copy holds after writes to it.
  void note_member_write(size_t param, const void* bytes, int64_t nbytes, c10::Device device);
  // The word for the next gather; 0 when there is nothing to compare.
  uint64_t word() const;
  // Whether what was noted is noted on all ranks of the mesh or on none. Copies and
  // factors may be noted on some only.
  bool is_of_all_ranks() const;
  // All ranks had the same word.
  void agreed();
  // What it says of all parameters, for ranks that look at it instead: table_size(params)
  // words.
  std::vector<uint64_t> table() const;
  static int64_t table_size(size_t param_count) {
    return static_cast<int64_t>(param_count * sizeof(Hashes) / sizeof(uint64_t));
  }
  // For ranks that read the others' tables, by rank: empty for this one, and for those
  // that say the same as this one or nothing. Which parameter differs, and how; what some
  // rank did not note differs from nothing. Empty: none.
  std::string difference_from(const std::vector<std::vector<uint64_t>>& tables,
                              const std::vector<std::string>& names) const;
  // For ranks of a mesh dimension whose words differ: which parameter does, and how; the
  // same on all of them. Empty where each noted the same or nothing, and this rank then
  // has what others noted. Collective over the dimension.
  std::string difference(const DeviceMesh& mesh, int64_t dim,
                         const std::vector<std::string>& names);

 private:
  struct Hashes {
    uint64_t start_geometry = 0;  // name, shape, dtype, sharded dimension, codec
    uint64_t start_values = 0;    // 0: not noted, as copied
    uint64_t member_write = 0;
    uint64_t copied = 0;
    uint64_t factors = 0;
  };
  std::vector<Hashes> params_;
};

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
  // per backward (step/exchange_after_backward.cc): what is compared of all gathers since
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
