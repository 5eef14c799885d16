// The all-gather's input where it is not the shards themselves (PyTorch's
// all_gather_inputs): the members have another dtype (MixedPrecisionPolicy::param_dtype),
// or are on a device while the shards are on the CPU (OffloadPolicy). This rank's shards
// are copied into a row like the members when a gather is issued; the row goes when the
// gather is over. With HFSDP it is the gather over the outer dimension. Local.
#pragma once

#include "fully_shard/params/fsdp_param.h"
#include "fully_shard/params/group_accounts.h"
#include "fully_shard/params/shard_buffer.h"
#include "fully_shard/params/unsharded_params.h"
#include "fully_shard/transport/packed_layout.h"
#include "fully_shard/transport/shard_grid.h"
#include "fully_shard/transport/transport.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp::internal {

class AllGatherInput {
 public:
  // `transport` outlives it; it gathers parts that lie on the places of `grid`.
  AllGatherInput(const std::vector<FSDPParam>& params, Transport& transport, const ShardGrid& grid,
                 GroupAccounts accounts);
  ~AllGatherInput() { drop(); }
  AllGatherInput(const AllGatherInput&) = delete;

  // Of every rank's row, in the members' dtypes.
  const PackedLayout& layout() const { return layout_; }
  // Copies the shards as they are now to `device`, on the current stream. Good until
  // drop() or the next call.
  PackedRow stage(const ShardBuffer& shards, const std::vector<FSDPParam>& params,
                  c10::Device device);
  void drop();

 private:
  void copy_each(const ShardBuffer& shards, const std::vector<FSDPParam>& params);
  void copy_at_once(const ShardBuffer& shards, const std::vector<FSDPParam>& params);
  // Of this rank's part of parameter `index` in the row: [n]. A view.
  at::Tensor place_of(int64_t index, const FSDPParam& param) const;

  Transport& transport_;
  ShardGrid grid_;
  PackedLayout layout_;
  GroupAccounts accounts_;
  at::Tensor bytes_;  // memory of the transport; undefined: no gather is under way
};

}  // namespace fsdp::internal
