#include "device_mesh/collectives/scratch_memory.h"
#include "fully_shard/params/runtime_mode.h"
#include "fully_shard/params/unsharded_params.h"
#include "fully_shard/transport/packed_copy.h"
#include "on_demand/on_demand_storage.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace fsdp::internal {
namespace {

// However the shards are cut.
std::vector<ShardExtent> evenly_cut(std::vector<ShardExtent> extents) {
  for (auto& extent : extents) extent.cut = {};
  return extents;
}

}  // namespace

UnshardedParams::~UnshardedParams() {
  gather_.drop();
  if (bytes_.defined()) count_shown(-1);
  streams_.free();
}

bool UnshardedParams::may_be_emptied() const {
  return state_.is_unsharded() && !users_.pinned() && !state_.is_held();
}

void UnshardedParams::empty(Leaves leaves) {
  state_.emptied(leaves);
  streams_.free();
  for (const auto& param : params_) {
    if (param.storage() != nullptr) param.storage()->empty();
  }
  count_shown(-1);
  if (leaves == Leaves::kPoison && !in_place_) {
    if (bytes_.is_cpu()) std::fill_n(static_cast<char*>(bytes_.data_ptr()), bytes_.numel(), '\xff');
    poisoned_ = bytes_;
  }
  in_place_.reset();
  bytes_.reset();
  drop_codes();
  writes_.copy_emptied();
  users_.clear_ready();
  info_.unit().root()->schedule().emptied(info_.unit().id);
}

void UnshardedParams::empty_if_stale() {
  if (state_.is_unsharded() && !state_.is_held() && writes_.is_stale()) empty();
}

void UnshardedParams::hold() {
  if (in_place_) copy_place();
  state_.hold();
}

void UnshardedParams::leave_shards() {
  if (!in_place_) return;
  may_be_emptied() ? empty() : copy_place();
}

// What is shown in place is a copy from now on.
void UnshardedParams::copy_place() {
  auto copy = scratch_memory({bytes_.numel()}, at::kByte, bytes_.device());
  std::memcpy(copy.mutable_data_ptr(), bytes_.const_data_ptr(), bytes_.nbytes());
  count_shown(-1);
  in_place_.reset();
  bytes_ = std::move(copy);
  show();
}

void UnshardedParams::set_neighbours(std::shared_ptr<Transport> neighbours) {
  drop_gather();
  drop_part();
  neighbours_ = std::move(neighbours);
  part_ = nullptr;
  if (!neighbours_) return;
  part_ = std::make_unique<RowMemory>(
      *neighbours_,
      PackedLayout(evenly_cut(member_extents_of(params_)), neighbours_->shard_count()),
      &Counters::post_forward_bytes, info_.accounts());
}

Leaves UnshardedParams::keep_part() {
  if (!part_ || !may_be_emptied() || writes_.is_dirty() || writes_.is_stale())
    return Leaves::kShards;
  const RuntimeMode runtime_mode;
  use();
  const auto device = shards_.member_device();
  part_->allocate(neighbours_->shard_memory(part_->layout().row_bytes(), device));
  auto* const row = static_cast<char*>(part_->bytes().mutable_data_ptr());
  for (int64_t index = 0; index < layout().size(); ++index) {
    const auto& chunk = part_->layout().chunk(index);
    pack_part(row + chunk.offset, data(index), chunk.part(neighbours_->shard_rank()), device);
  }
  part_->filled();
  return Leaves::kPart;
}

void UnshardedParams::drop_part() {
  if (part_) part_->free();
  state_.part_dropped();
}

void UnshardedParams::copy_to_shard(int64_t index) {
  shards_.await_copies();
  const auto here = DeviceStream::current(bytes_.device());
  streams_.use_after_others(here, StreamWait::kWriteBackAfterWrites);
  wrote_shards_.add(here);
  const auto& param = params_[static_cast<size_t>(index)];
  if (&layout_of_shards() == &shards_.layout()) return shards_.take_part(index, data(index));
  const auto& chunk = layout().chunk(index);
  const auto whole =
      bytes_.narrow(0, chunk.whole_offset, chunk.extent.nbytes()).view(param.meta().member_dtype());
  auto values = layout_of_shards().chunk(index);
  values.extent.row_bytes = chunk.extent.row_bytes;
  const auto part = view_of_part(whole, values.part(shards_.grid().place()));
  shards_.elements(index, param).view(part.sizes()).copy_(part);
}

}  // namespace fsdp::internal
