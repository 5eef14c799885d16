// Mixed precision: what a group gathers where its members have another dtype than its
// shards (MixedPrecisionPolicy::param_dtype). This rank's shards are cast into a row of
// the members' dtypes when a gather is issued; the row goes when the gather is over.
// Local.
#pragma once

#include "fully_shard/params/group_accounts.h"
#include "fully_shard/params/shard_buffer.h"
#include "fully_shard/params/sharded_param.h"
#include "fully_shard/params/unsharded_copy.h"
#include "fully_shard/transport/packed_layout.h"
#include "fully_shard/transport/transport.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp::internal {

class CastRow {
 public:
  // `transport` outlives it. Throws NotImplementedError for a one-sided one, whose other
  // ranks might read a row before it is written.
  CastRow(const std::vector<ShardedParam>& params, Transport& transport, GroupAccounts accounts);
  ~CastRow() { drop(); }
  CastRow(const CastRow&) = delete;

  // Of every rank's row, in the members' dtypes.
  const PackedLayout& layout() const { return layout_; }
  // Casts the shards as they are now. Good until drop() or the next call.
  PackedRow cast(const ShardBuffer& shards, const std::vector<ShardedParam>& params);
  void drop();

 private:
  Transport& transport_;
  PackedLayout layout_;
  GroupAccounts accounts_;
  at::Tensor bytes_;  // memory of the transport; undefined: no gather is under way
};

}  // namespace fsdp::internal
