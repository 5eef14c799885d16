#include "fully_shard/params/post_forward_shards.h"

#include "fully_shard/params/shard_buffer.h"
#include "fully_shard/transport/packed_copy.h"

#include <utility>

namespace fsdp::internal {
namespace {

// However the shards are cut.
std::vector<ShardExtent> evenly_cut(std::vector<ShardExtent> extents) {
  for (auto& extent : extents) extent.cut = {};
  return extents;
}

}  // namespace

PostForwardShards::PostForwardShards(const std::vector<FSDPParam>& params,
                                     std::shared_ptr<Transport> neighbours, GroupAccounts accounts)
    : neighbours_(std::move(neighbours)),
      layout_(evenly_cut(member_extents_of(params)), neighbours_->shard_count()),
      accounts_(std::move(accounts)) {}

void PostForwardShards::keep(UnshardedParams& unsharded, const PackedLayout& layout,
                             c10::Device device) {
  drop();
  unsharded.use();
  bytes_ = neighbours_->shard_memory(layout_.row_bytes(), device);
  accounts_.add(&Counters::post_forward_bytes, bytes_.numel());
  auto* const row = static_cast<char*>(bytes_.mutable_data_ptr());
  const auto rank = neighbours_->shard_rank();
  for (int64_t index = 0; index < layout_.size(); ++index) {
    const auto& chunk = layout_.chunk(index);
    pack_part(row + chunk.offset, unsharded.memory().data(layout, index), chunk.part(rank), device);
  }
  memory_.ready(DeviceStream::current(device));
}

void PostForwardShards::drop() {
  if (!bytes_.defined()) return;
  accounts_.add(&Counters::post_forward_bytes, -bytes_.numel());
  memory_.free();
  bytes_.reset();
}

}  // namespace fsdp::internal
