// HFSDP (Outer::kShardOptimizer): the inner shards of a group, which gathers over the
// inner dimension read, in the members' dtypes. Registry entries are pieces of them, one
// on each rank of the outer dimension. A gather over that dimension puts the pieces
// together, and what it brought stays until the pieces change: that is once per step.
//
//   inner.issue(words, layouts);       // where they are stale; may come ahead of the use
//   const auto heard = inner.wait();   // the words of the outer ranks
//   inner.agreed();                    // they agree: not stale any more
//   ...gather inner.row() over the inner dimension...
//   inner.pieces_change();             // an operator or a reduction: stale
//
// Which ranks find them stale must not differ along the outer dimension: every rank that
// publishes gradients does, whether its optimizer will write or not.
#pragma once

#include "fully_shard/params/all_gather.h"
#include "fully_shard/params/group_info.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace fsdp::internal {

// Whether all ranks have been found to cut the parameters alike: then rows are sent as
// long as they are, where the transport can.
enum class Layouts : uint8_t { kNotCompared, kAgreed };

class InnerShards {
 public:
  // All outlive it; `info` has pieces.
  InnerShards(const GroupInfo& info, const std::vector<FSDPParam>& params,
              const ShardBuffer& shards);
  ~InnerShards() { pieces_change(); }
  InnerShards(const InnerShards&) = delete;

  const PackedLayout& layout() const { return row_.layout(); }  // of every inner rank's row
  // Of this rank's pieces on the places of the grid, in the members' dtypes.
  const PackedLayout& layout_of_pieces() const;

  bool are_stale() const { return is_stale_; }
  // Stale, and no gather that makes them is under way.
  bool are_to_be_issued() const;
  // Drops a gather that is under way, since it reads the pieces.
  void pieces_change();

  // Gathers the outer ranks' pieces; does not block. REQUIRES: are_to_be_issued().
  // Collective over the outer dimension.
  void issue(NoticeWords words, Layouts layouts);
  // Puts the pieces together. Gives what the outer ranks said; nothing where no words
  // travel, or nothing is under way. Throws what failed; they are stale then as before.
  std::vector<NoticeWords> wait();
  void agreed() { is_stale_ = false; }

  // To be gathered by the calling thread's stream. REQUIRES: not stale.
  PackedRow row() { return row_.row(); }

 private:
  PackedRow pieces();
  std::vector<int64_t> lengths_of_column() const;
  void unpack(const GatheredRows& rows);

  const GroupInfo& info_;
  const std::vector<FSDPParam>& params_;
  const ShardBuffer& shards_;
  RowMemory row_;
  std::unique_ptr<RowMemory> staging_;  // of pieces; null: they are sent as they are
  bool is_stale_ = true;
  AllGather gather_;
};

}  // namespace fsdp::internal
