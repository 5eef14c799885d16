// Keeps shards and unsharded parameters coherent: what is written to members reaches the
// shards, what is written to registry entries makes the unsharded copy stale, and both
// are noted for what all ranks must have alike (rank_agreement.h). Local.
#pragma once

#include "fully_shard/params/group_info.h"
#include "fully_shard/params/rank_agreement.h"
#include "fully_shard/params/shard_buffer.h"
#include "fully_shard/params/shard_writes.h"
#include "fully_shard/params/unsharded_params.h"
#include "on_demand/on_demand_storage.h"
#include "on_demand/pass.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace fsdp::internal {

class WriteCoherence {
 public:
  // All outlive it; `users`: what operators pin and find ready.
  WriteCoherence(const GroupInfo& info, std::vector<FSDPParam>& params, const ShardBuffer& shards,
                 ShardWrites& writes, UnshardedParams& unsharded, RankAgreement& agreement,
                 Touchable& users);
  WriteCoherence(const WriteCoherence&) = delete;

  // Which of the shards and the members is newest.
  ShardWrites& newest() const { return newest_; }

  // Members.

  // An operator is about to write member `index`, before and after the group is unsharded
  // for it.
  void before_member_write(int64_t index);
  void member_written(int64_t index);
  // What was written to the members goes to the shards, and the copy is emptied: the next
  // read gathers what every rank wrote. Nothing when nothing was written, or held.
  void flush_member_writes();
  // What was written to the members goes to the shards; the copy stays.
  void write_back();
  // The same, and what was written need not be alike on all ranks.
  void write_back_own_parts();
  // With DebugOptions::write_checks: notes members that were written through a pointer.
  void note_raw_writes();

  // Registry entries, by parameter.

  // The shard is about to be read: it receives what was written to the copy. The
  // parameter stays dirty all the same: if a read cleaned it, ranks that read would
  // gather at other times than the others. While the group is held, the shard stays as it
  // was.
  void before_read(int64_t index);
  // An operator is about to write the shard: waits for a gather in flight, and makes the
  // copy stale.
  void before_write(int64_t index);
  // It has written the shard.
  void after_write();
  // An alias of a shard is given out, through which it may be written at any time.
  void shard_given_out();
  // All shards have been filled: start values, or what was there before.
  void shards_filled();
  // The parameter is about to be written with plain tensors without dimensions, whose
  // numbers have this hash: the next gather compares it.
  void before_factors(int64_t index, uint64_t hash);
  // Other values took the place of all of the parameter, by way of `written`, its entry
  // or a view of that. Those of `source`, which is plain, the next gather compares; it is
  // undefined where they are no plain tensor's. Reads all of it, if it is on the CPU.
  void after_overwrite(int64_t index, const at::Tensor& written, const at::Tensor& source);
  // The same of a parameter whose shard was made anew from `whole`.
  void remade(int64_t index, const at::Tensor& whole);

  // Throws where a graph older than the last write runs backward.
  void check_graph_is_current(Pass pass) const;
  // For DebugOptions::write_checks: throws for shards that were written through an alias.
  void check_shards_are_announced();

 private:
  void note_copy(int64_t index, const at::Tensor& whole);
  void begin_shard_write();
  FSDPParam& param(int64_t index) { return params_[static_cast<size_t>(index)]; }
  AgreedValues& values() { return agreement_.values(); }

  const GroupInfo& info_;
  std::vector<FSDPParam>& params_;
  const ShardBuffer& shards_;
  ShardWrites& newest_;
  UnshardedParams& unsharded_;
  RankAgreement& agreement_;
  Touchable& users_;
  // Of the local tensors when last seen; none after a write that was announced.
  std::vector<std::optional<uint32_t>> shard_versions_;
  // One shard was written back early. The write stays open until the whole unit is
  // written back, which happens on every rank.
  bool is_writing_back_ = false;
};

}  // namespace fsdp::internal
