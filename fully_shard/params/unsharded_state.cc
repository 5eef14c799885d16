#include "fully_shard/params/unsharded_state.h"

#include "device_mesh/debug.h"
#include "device_mesh/internal/device_stream.h"
#include "device_mesh/internal/profiler_range.h"
#include "fully_shard/params/runtime_mode.h"
#include "fully_shard/transport/packed_copy.h"
#include "fully_shard/units/root.h"
#include "on_demand/on_demand_storage.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <string>
#include <utility>

namespace fsdp::internal {
namespace {

// Makes the gather wait for the event that set_post_optim_event() was given.
void await_optimizer(Root& root, const DeviceStream& issuer) {
  const auto event = root.take_gather_after();
  if (event) issuer.wait(*event);
}

// What finds unannounced writes compares copies with the shards, or poisons copies.
SharedShards::ReadBy read_by(const ShardBuffer& shards) {
  const bool needs_copies = debug_options().write_checks || evict_after_every_operator();
  return needs_copies || !shards.layout().chunks_make_wholes() ? SharedShards::ReadBy::kCopy
                                                               : SharedShards::ReadBy::kInPlace;
}

}  // namespace

UnshardedState::UnshardedState(const GroupInfo& info, std::vector<FSDPParam>& params,
                               const ShardBuffer& shards, Touchable& users)
    : info_(info),
      params_(params),
      shards_(shards),
      users_(users),
      unsharded_params_(info.is_alone() && !are_staged(params, shards) ? ShardedState::kNeverSharded
                                                                       : ShardedState::kSharded,
                        info.comm_context().shard_count(), info.accounts()),
      source_(info, params, shards) {}

void UnshardedState::issue_inner_shards(NoticeWords words) {
  if (!source_.needs_inner_shards()) return;
  await_what_shards_become(DeviceStream::current(shards_.member_device()));
  source_.issue_inner_shards(words);
}

// What streams still write to the shards is to be gathered.
void UnshardedState::await_what_shards_become(const DeviceStream& issuer) {
  await_optimizer(*info_.unit().root(), issuer);
  unsharded_params_.await_what_went_to_shards(issuer);
}

void UnshardedState::check_has_values() const {
  if (shards_.has_values()) return;
  std::vector<std::string> names;
  for (const auto& param : params_) names.push_back(param.name());
  TORCH_CHECK_VALUE(false, "the parameters of unit '", info_.name(),
                    "' have no values yet, since fully_shard met them on the meta device: '",
                    c10::Join("', '", names),
                    "'. Call fsdp::materialize(model) first, and load files after it (rank ",
                    info_.rank(), ")");
}

void UnshardedState::issue(NoticeWords words) {
  await_what_shards_become(DeviceStream::current(shards_.member_device()));
  source_.gather_count().gathered();
  const auto send = [&](const PackedRow& row, const Communicate* custom) {
    const auto bytes = (row.transport.shard_count() - 1) * row.layout.row_bytes();
    const ProfilerRange range("all_gather", info_.name(), bytes);
    unsharded_params_.issue(row, source_.issue_of(row, words, custom));
  };
  if (post_forward_ && post_forward_->is_kept()) return send(post_forward_->row(), nullptr);
  const auto& custom = info_.unit().custom.all_gather;
  if (source_.is_staged() || shards_.shared() == nullptr || custom)
    return send(source_.row(), &custom);
  const auto bytes = (info_.comm_context().shard_count() - 1) * shards_.layout().row_bytes();
  const ProfilerRange range("all_gather", info_.name(), bytes);
  const auto what = "read of the shards of " + in_words(info_.issue({}));
  unsharded_params_.issue_read(shards_.shared()->read(what, read_by(shards_)), shards_);
}

void UnshardedState::hold() {
  unsharded_params_.leave_shards(layout(), params_);
  unsharded_params_.hold();
}

void UnshardedState::leave_shards() {
  if (!unsharded_params_.memory().is_in_place()) return;
  if (may_be_emptied()) return empty();
  unsharded_params_.leave_shards(layout(), params_);
}

Gathered UnshardedState::wait() {
  Gathered gathered{.from =
                        unsharded_params_.is_reading() ? CameFrom::kRead : CameFrom::kAllShards};
  if (post_forward_ && post_forward_->is_kept()) gathered.from = CameFrom::kNeighbours;
  try {
    auto said = unsharded_params_.fill(layout(), params_, shards_.member_device());
    gathered.words = std::move(said.words);
    gathered.tables = std::move(said.tables);
  } catch (...) {
    source_.drop_staged();
    info_.driver().resharded(info_.unit());
    throw;
  }
  source_.drop_staged();
  writes_->copy_filled();
  drop_post_forward_shards();
  return gathered;
}

void UnshardedState::drop_gather() noexcept {
  if (!sharded_state().is_gathering()) return;
  unsharded_params_.drop_gather();
  gather_was_dropped();
}

void UnshardedState::await_and_drop_gather() {
  const RuntimeMode runtime_mode;
  unsharded_params_.await_and_drop();
  gather_was_dropped();
}

void UnshardedState::gather_was_dropped() noexcept {
  source_.drop_staged();
  info_.accounts().count(&Counters::unused_prefetches);
  info_.driver().resharded(info_.unit());
}

bool UnshardedState::may_be_emptied() const {
  return sharded_state().is_unsharded() && !users_.pinned() && !sharded_state().is_held();
}

void UnshardedState::empty() {
  unsharded_params_.empty(params_);
  writes_->copy_emptied();
  users_.unsettle();
  info_.driver().resharded(info_.unit());
}

void UnshardedState::empty_if_stale() {
  if (sharded_state().is_unsharded() && !sharded_state().is_held() && writes_->is_stale()) empty();
}

void UnshardedState::set_neighbours(std::shared_ptr<Transport> neighbours) {
  drop_gather();
  post_forward_.reset();
  if (neighbours)
    post_forward_ =
        std::make_unique<PostForwardShards>(params_, std::move(neighbours), info_.accounts());
}

void UnshardedState::keep_post_forward_shards() {
  if (!post_forward_ || !may_be_emptied() || writes_->is_dirty() || writes_->is_stale()) return;
  const RuntimeMode runtime_mode;
  post_forward_->keep(unsharded_params_, layout(), shards_.member_device());
}

void UnshardedState::drop_post_forward_shards() {
  if (post_forward_) post_forward_->drop();
}

void UnshardedState::layouts_changed() {
  source_.layouts_changed();
  if (post_forward_) set_neighbours(post_forward_->neighbours());
}

void UnshardedState::copy_to_shard(int64_t index) {
  shards_.await_copies();
  unsharded_params_.use_for_shards();
  if (!source_.is_staged()) return shards_.take_part(index, data(index));
  const auto& param = params_[static_cast<size_t>(index)];
  const auto whole = unsharded_params_.memory().elements(layout(), index, param.meta());
  const auto part =
      view_of_part(whole, source_.layout_of_shards().chunk(index).part(shards_.grid().place()));
  shards_.elements(index, param).view(part.sizes()).copy_(part);
}

}  // namespace fsdp::internal
