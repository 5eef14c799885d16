// The parameters of a group while they are unsharded (PyTorch's unshard and reshard): the
// all-gather that brings them, the memory where they lie, and the members' storages that
// show it. What may be done when is ShardedStateMachine's business (sharded_state.h); an
// illegal step is a std::logic_error.
//
//   unshard.cc    where a gather comes from, its issue, the members filled, gathers dropped
//   reshard.cc    members emptied or held, a part left for the backward, shards written back
//
// Where a gather comes from (GatherFrom):
//
//   kShards       the ranks' shards, which they send each other
//   kStaged       copies of them as codes, in another dtype or from host memory: codecs, mixed
//                 precision, offload
//   kInnerShards  HFSDP: what the outer ranks' pieces make, staged or not (InnerShards)
//   kNeighbours   to_world(n): the parts that a forward left on n neighbouring ranks
//   kRead         the shards where all ranks of one host have them, read by this rank alone,
//                 where ranks share memory and nothing above is asked for
//
// The full parameters are a copy, or, after kRead, may be shown in place: the memory
// where all ranks have their shards. Either way parameter i is contiguous, where the
// layout of common memory has it. They are memory of the stream that filled them; a
// gather's rows are memory of the one that issued it.
//
// Tells the root's schedule when the group is sharded again.
#pragma once

#include "fully_shard/params/all_gather.h"
#include "fully_shard/params/fsdp_param.h"
#include "fully_shard/params/group_info.h"
#include "fully_shard/params/shard_buffer.h"
#include "fully_shard/params/shard_writes.h"
#include "fully_shard/params/sharded_state.h"
#include "fully_shard/transport/streams.h"
#include "on_demand/on_demand_storage.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::internal {

enum class GatherFrom : uint8_t { kShards, kStaged, kInnerShards, kNeighbours, kRead };
// Whether all ranks that shard took part, and told each other words with it.
inline bool is_of_all_ranks(GatherFrom from) {
  return from != GatherFrom::kNeighbours && from != GatherFrom::kRead;
}

// What the ranks said with a gather.
struct Gathered {
  GatherFrom from = GatherFrom::kShards;
  std::vector<NoticeWords> words = {};
  // Of a read, by rank: empty where a rank says the same as this one, or nothing.
  std::vector<std::vector<uint64_t>> tables = {};
};

class UnshardedParams {
 public:
  // All outlive it; `writes`: which of the full parameters and the shards is newest;
  // `users`: what operators pin and find ready.
  UnshardedParams(const GroupInfo& info, std::vector<FSDPParam>& params, const ShardBuffer& shards,
                  ShardWrites& writes, Touchable& users);
  ~UnshardedParams();
  UnshardedParams(const UnshardedParams&) = delete;

  const ShardedStateMachine& state() const { return state_; }
  // Of all shards in the members' dtypes: as the full parameters lie.
  const PackedLayout& layout() const {
    return member_layout_ ? *member_layout_ : gathered_layout();
  }
  // Throws ValueError with the parameters' names while they are on the meta device.
  void check_has_values() const;
  GatherCount& gather_count() { return gather_count_; }

  // Unshard.

  // Issues the gather; does not block. `words` travel with it. REQUIRES: sharded, and
  // inner shards that are not stale. Collective over the ranks that shard, or those that
  // share what a forward left; local for kRead.
  void issue(NoticeWords words);
  // Waits for the gather and fills the members. REQUIRES: gathering. After a failure the
  // group is sharded again.
  Gathered wait();
  // The ranks agree, with kAgreed all of them on how they cut the parameters. Codes that
  // came become the members' values now. Throws what a codec throws; members have no
  // values then. REQUIRES: waited for.
  void agreed(Layouts layouts);
  // The calling thread's stream is about to use the full parameters. REQUIRES: unsharded.
  void use() { streams_.use(DeviceStream::current(bytes_.device())); }
  // Waits for a gather in flight and drops what it brought, failed or not: it was in
  // vain.
  void drop_gather() noexcept;
  // The same, and throws if it failed. REQUIRES: gathering.
  void await_and_drop_gather();
  // The members have other dtypes, or the shards lie elsewhere. REQUIRES: sharded or
  // never sharded.
  void layouts_changed();
  // HFSDP; null without.
  InnerShards* inner_shards() { return inner_shards_.get(); }
  // Gathers the pieces of stale inner shards, after what is written to them; does not
  // block. Nothing without HFSDP. Collective over the outer dimension.
  void issue_inner_shards(NoticeWords words);
  // The shards are written, or will be since their gradients were reduced.
  void shards_change();

  // Reshard.

  // Unsharded, and neither pinned nor held.
  bool may_be_emptied() const;
  // REQUIRES: unsharded, not held, not dirty.
  void empty(Leaves leaves = Leaves::kShards);
  // Empties a copy that is older than the shards.
  void empty_if_stale();
  // Unsharded until release(), and readable and writable through pointers; nests.
  // REQUIRES: unsharded or never sharded.
  void hold();
  void release() { state_.release(); }
  // Between forward and backward, one n-th of the parameters stays on each of n
  // neighbouring ranks; null: only the shards do. Local.
  void set_neighbours(std::shared_ptr<Transport> neighbours);
  // Copies this rank's part, where that is asked for and may be kept. The result is for
  // the empty() that follows.
  Leaves keep_part();
  void drop_part();
  // To be called before an operator that pins the full parameters writes them, and before
  // this rank's shards are written. Where the members show the shards themselves, they
  // become a copy, or are freed if nobody needs them.
  void leave_shards();

  // What the copy holds of parameter `index`, in the member's dtype. REQUIRES: unsharded.
  char* data(int64_t index) const {
    return static_cast<char*>(bytes_.data_ptr()) + layout().chunk(index).whole_offset;
  }
  // This rank's part of that replaces its shard. REQUIRES: unsharded.
  void copy_to_shard(int64_t index);

 private:
  GatherFrom gather_from() const;
  // Whether the gather that was issued last brings codes.
  bool sends_codes() const { return member_layout_ && from_ != GatherFrom::kNeighbours; }
  std::string codes_in_words() const;
  void drop_codes();
  PackedRow row_to_send(GatherFrom from);
  void issue_read();
  void await_writers_of_shards();
  const PackedLayout& layout_of_shards() const;
  const PackedLayout& gathered_layout() const;
  void fill_from(const GatheredRows& rows);
  void show();
  void count_shown(int64_t sign) const;
  void copy_place();
  void is_sharded_again() noexcept;

  const GroupInfo& info_;
  std::vector<FSDPParam>& params_;
  const ShardBuffer& shards_;
  ShardWrites& writes_;
  Touchable& users_;
  ShardedStateMachine state_;
  GatherCount gather_count_;

  std::unique_ptr<RowMemory> staging_;           // null: shards are sent as they are
  std::unique_ptr<InnerShards> inner_shards_;    // null: this rank's shards are whole
  std::unique_ptr<PackedLayout> member_layout_;  // null: as what is gathered, which is no codes
  std::shared_ptr<Transport> neighbours_;        // to_world(n); null: nothing is kept
  std::unique_ptr<RowMemory> part_;              // what a forward leaves, with neighbours_
  Layouts layouts_ = Layouts::kNotCompared;
  GatherFrom from_ = GatherFrom::kShards;  // of the gather that was issued last
  AllGather gather_;
  CodecFailure failure_;  // of the row that was issued last
  at::Tensor codes_;      // what came, until it is decoded

  std::unique_ptr<ReadInPlace> in_place_;  // null: a copy
  at::Tensor bytes_;                       // uint8; undefined: empty
  at::Tensor poisoned_;                    // what was emptied last with Leaves::kPoison
  StreamMemory streams_{StreamWait::kUseAfterFill, StreamWait::kFreeAfterUse};  // bytes_
  StreamSet wrote_shards_;  // since the last gather was issued
};

}  // namespace fsdp::internal
