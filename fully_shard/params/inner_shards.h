// HFSDP (Outer::kShardOptimizer): the inner shards of a group, which gathers over the
// inner dimension read, in the members' dtypes. Registry entries are pieces of them, one
// on each rank of the outer dimension. A gather over that dimension puts the pieces
// together, and what it brought stays until the pieces change: that is once per step.
//
//   inner.issue(pieces, words);        // where they are stale; may come ahead of the use
//   const auto heard = inner.wait();   // the words of the outer ranks
//   inner.agreed();                    // they agree: not stale any more
//   ...gather inner.row() over the inner dimension...
//   inner.pieces_change();             // an operator or a reduction: stale
//
// Which ranks find them stale must not differ along the outer dimension: every rank that
// publishes gradients does, whether its optimizer will write or not.
#pragma once

#include "fully_shard/params/fsdp_param.h"
#include "fully_shard/params/gather_in_flight.h"
#include "fully_shard/params/group_info.h"
#include "fully_shard/params/unsharded_params.h"
#include "fully_shard/transport/packed_layout.h"
#include "fully_shard/transport/shard_grid.h"
#include "fully_shard/transport/stream_memory.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp::internal {

class InnerShards {
 public:
  // `info` outlives it and has pieces. device: of the members.
  InnerShards(const GroupInfo& info, const std::vector<FSDPParam>& params, c10::Device device);
  ~InnerShards();
  InnerShards(const InnerShards&) = delete;

  // Of every inner rank's row.
  const PackedLayout& layout() const { return layout_; }

  bool are_stale() const { return is_stale_; }
  // Drops a gather that is under way, since it reads the pieces.
  void pieces_change();

  // Gathers what this rank has with the other outer ranks' pieces; does not block.
  // pieces.layout: of the places of the grid, in the members' dtypes; outlives the
  // gather. issue.lengths: null, or the layout's. REQUIRES: stale, and not under way.
  // Collective over the outer dimension.
  void issue(const PackedRow& pieces, Issue issue);
  bool is_under_way() const { return gather_.exists(); }
  // Puts the pieces together. Gives what the outer ranks said; nothing where no words
  // travel. Throws what failed; they are stale then as before. REQUIRES: under way.
  std::vector<NoticeWords> wait();
  void agreed() { is_stale_ = false; }

  // To be gathered by the calling thread's stream. REQUIRES: not stale.
  PackedRow row();

 private:
  // Of the rows of this rank's column: its inner shards' pieces.
  std::vector<int64_t> lengths_of_column(const PackedLayout& pieces) const;
  void unpack(const GatheredRows& rows);

  const GroupInfo& info_;
  ShardGrid grid_;
  PackedLayout layout_;
  at::Tensor bytes_;  // memory of the inner transport
  StreamMemory memory_{StreamWait::kUseAfterFill, StreamWait::kFreeAfterUse};  // bytes_
  bool is_stale_ = true;
  GatherInFlight gather_;
  const PackedLayout* pieces_ = nullptr;  // of the gather
};

}  // namespace fsdp::internal
