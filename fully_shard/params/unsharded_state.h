// The unsharded state of a parameter group (PyTorch's unshard and reshard): the gather in
// flight, the full parameters while they are there, what a forward leaves of them for the
// backward, and which of the full parameters and the shards is newest.
//
//   UnshardedParams    the gather and the full parameters
//   AllGatherSource    the shards as they are gathered
//   PostForwardShards  to_world(n): a part of the full parameters that a forward leaves
//   ShardWrites        which of the full parameters and the shards is newest
//
// Tells the group's driver when the group is sharded again.
#pragma once

#include "fully_shard/params/all_gather_source.h"
#include "fully_shard/params/group_info.h"
#include "fully_shard/params/post_forward_shards.h"
#include "fully_shard/params/shard_buffer.h"
#include "fully_shard/params/shard_writes.h"
#include "fully_shard/params/unsharded_params.h"
#include "on_demand/touchable.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace fsdp::internal {

// Where the gathered data came from: the shards of all ranks, the neighbours of
// to_world(n), or a read by this rank alone, which was not compared with other ranks yet.
enum class CameFrom : uint8_t { kAllShards, kNeighbours, kRead };
struct Gathered {
  CameFrom from = CameFrom::kAllShards;
  std::vector<NoticeWords> words = {};
  // Of a read, by rank: empty where a rank says the same as this one, or nothing.
  std::vector<std::vector<uint64_t>> tables = {};
};

class UnshardedState {
 public:
  // All outlive it; `users`: what operators pin and find settled.
  UnshardedState(const GroupInfo& info, std::vector<FSDPParam>& params, const ShardBuffer& shards,
                 Touchable& users);
  UnshardedState(const UnshardedState&) = delete;

  const ShardedStateMachine& sharded_state() const { return unsharded_params_.sharded_state(); }
  // Of all shards in the members' dtypes: as the full parameters lie, too.
  const PackedLayout& layout() const { return source_.layout(); }
  ShardWrites& writes() const { return *writes_; }
  // For what may outlive the group.
  std::weak_ptr<ShardWrites> weak_writes() const { return writes_; }
  // Throws ValueError with the parameters' names while they are on the meta device.
  void check_has_values() const;

  // What is gathered. Of HFSDP's inner shards: issue_inner_shards(), as the source has
  // it, after what is written to the shards.
  AllGatherSource& source() { return source_; }
  void issue_inner_shards(NoticeWords words);

  // Issues the gather; does not block. `words` travel with it. REQUIRES: sharded, and
  // inner shards that are not stale.
  // Collective over the ranks that shard, or those that share what a forward left.
  void issue(NoticeWords words);
  // Waits for the gather and fills the members. REQUIRES: gathering. After a failure the
  // group is sharded again.
  Gathered wait();
  // The calling thread's stream is about to use the full parameters. REQUIRES: unsharded.
  void use() { unsharded_params_.use(); }
  // Waits for a gather in flight and drops what it brought, failed or not: it was in
  // vain.
  void drop_gather() noexcept;
  // The same, and throws if it failed. REQUIRES: gathering.
  void await_and_drop_gather();

  // Unsharded, and neither pinned nor held.
  bool may_be_emptied() const;
  // REQUIRES: unsharded, not held, not dirty.
  void empty();
  // Empties a copy that is older than the shards.
  void empty_if_stale();
  // Test mode: the bytes read 0xff from now on, even through pointers that were kept.
  void poison() { unsharded_params_.poison(); }
  // Unsharded until release(), and readable and writable through pointers; nests.
  // REQUIRES: unsharded or never sharded.
  void hold();
  void release() { unsharded_params_.release(); }

  // Between forward and backward, one n-th of the parameters stays on each of n
  // neighbouring ranks; null: only the shards do. Local.
  void set_neighbours(std::shared_ptr<Transport> neighbours);
  // Keeps that part of the copy, where it is asked for and may be kept. Local.
  void keep_post_forward_shards();
  void drop_post_forward_shards();
  // The members have other dtypes, or the shards lie elsewhere. REQUIRES: sharded or
  // never sharded.
  void layouts_changed();

  // To be called before an operator that pins the full parameters writes them, and before
  // this rank's shards are written. Where the members show the shards themselves, they
  // become a copy, or are freed if nobody needs them.
  void leave_shards();

  // What the copy holds of parameter `index`, in the member's dtype. REQUIRES: unsharded.
  char* data(int64_t index) const { return unsharded_params_.memory().data(layout(), index); }
  // This rank's part of that replaces its shard. REQUIRES: unsharded.
  void copy_to_shard(int64_t index);

 private:
  void await_what_shards_become(const DeviceStream& issuer);
  void gather_was_dropped() noexcept;

  const GroupInfo& info_;
  std::vector<FSDPParam>& params_;
  const ShardBuffer& shards_;
  Touchable& users_;
  UnshardedParams unsharded_params_;
  std::shared_ptr<ShardWrites> writes_ = std::make_shared<ShardWrites>();
  AllGatherSource source_;
  std::unique_ptr<PostForwardShards> post_forward_;  // null: nothing is kept
};

}  // namespace fsdp::internal
