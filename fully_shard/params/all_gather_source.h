// What a group sends when it is gathered: its shards as they lie; copies of them in
// another dtype or on another device (all_gather_input.h); or, with HFSDP, the inner
// shards that its shards are pieces of (inner_shards.h). Local, but where a function says
// otherwise.
#pragma once

#include "fully_shard/params/all_gather_input.h"
#include "fully_shard/params/fsdp_param.h"
#include "fully_shard/params/gather_count.h"
#include "fully_shard/params/group_info.h"
#include "fully_shard/params/inner_shards.h"
#include "fully_shard/params/shard_buffer.h"
#include "fully_shard/params/unsharded_params.h"
#include "fully_shard/transport/packed_layout.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace fsdp::internal {

bool are_staged(const std::vector<FSDPParam>& params, const ShardBuffer& shards);

class AllGatherSource {
 public:
  // All outlive it.
  AllGatherSource(const GroupInfo& info, const std::vector<FSDPParam>& params,
                  const ShardBuffer& shards);

  // Of the rows of all ranks that a gather is over, in the members' dtypes; and of this
  // rank's shards on the places of their grid, in those dtypes.
  const PackedLayout& layout() const;
  const PackedLayout& layout_of_shards() const;
  // Whether shards are copied before they are sent.
  bool is_staged() const { return all_gather_input_ != nullptr; }

  // This rank's row, for the gather that is about to be issued. REQUIRES: inner shards
  // were waited for.
  PackedRow row();
  // What its gather is issued as.
  Issue issue_of(const PackedRow& row, NoticeWords words, const Communicate* custom) const;
  // All ranks have been found to cut the parameters alike: from now on rows are sent as
  // long as they are, where the transport can.
  void layouts_agreed() { layouts_ = Layouts::kAgreed; }
  // A gather is over, or was dropped: what was staged for it goes.
  void drop_staged();

  // How often it was gathered.
  GatherCount& gather_count() { return gather_count_; }

  // HFSDP: whether inner shards are stale, and no gather that makes them is under way.
  bool needs_inner_shards() const {
    return inner_shards_are_stale() && !inner_shards_->is_under_way() && shards_.has_values();
  }
  // Gathers pieces that make them; does not block. REQUIRES: needs_inner_shards().
  // Collective over the outer dimension.
  void issue_inner_shards(NoticeWords words);
  // Waits for that. Gives what the outer ranks said; nothing where there was nothing to
  // wait for.
  std::vector<NoticeWords> wait_for_inner_shards();
  void inner_shards_agreed();
  bool inner_shards_are_stale() const { return inner_shards_ && inner_shards_->are_stale(); }
  // The shards are written, or will be since their gradients were reduced.
  void shards_change();

  // The members have other dtypes, or the shards lie elsewhere.
  void layouts_changed();

 private:
  enum class Layouts : uint8_t { kNotCompared, kAgreed };
  PackedRow packed_shards(Transport& transport);

  const GroupInfo& info_;
  const std::vector<FSDPParam>& params_;
  const ShardBuffer& shards_;
  std::unique_ptr<AllGatherInput> all_gather_input_;  // null: shards are sent as they are
  std::unique_ptr<InnerShards> inner_shards_;         // null: this rank's shards are whole
  Layouts layouts_ = Layouts::kNotCompared;
  GatherCount gather_count_;
};

}  // namespace fsdp::internal
