#include "device_mesh/collectives/scratch_memory.h"
#include "device_mesh/debug.h"
#include "device_mesh/internal/profiler_range.h"
#include "fully_shard/params/runtime_mode.h"
#include "fully_shard/params/unsharded_params.h"
#include "fully_shard/units/unit.h"
#include "on_demand/on_demand_storage.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <string>
#include <utility>

namespace fsdp::internal {
namespace {

// What finds unannounced writes compares copies with the shards, or poisons copies.
SharedShards::ReadBy read_by(const ShardBuffer& shards, const std::vector<FSDPParam>& params) {
  const bool needs_copies = debug_options().write_checks || evict_after_every_operator() ||
                            any(params, &ParamMeta::is_encoded);
  return needs_copies || !shards.layout().chunks_make_wholes() ? SharedShards::ReadBy::kCopy
                                                               : SharedShards::ReadBy::kInPlace;
}

}  // namespace

UnshardedParams::UnshardedParams(const GroupInfo& info, std::vector<FSDPParam>& params,
                                 const ShardBuffer& shards, ShardWrites& writes, Touchable& users)
    : info_(info),
      params_(params),
      shards_(shards),
      writes_(writes),
      users_(users),
      state_(info.is_alone() && !are_staged(params, shards) ? ShardedState::kNeverSharded
                                                            : ShardedState::kSharded),
      gather_(info.accounts()) {
  layouts_changed();
}

void UnshardedParams::layouts_changed() {
  inner_shards_.reset();
  staging_.reset();
  if (info_.has_pieces()) {
    inner_shards_ = std::make_unique<InnerShards>(info_, params_, shards_);
  } else {
    staging_ = make_staging(params_, shards_, info_.comm_context().transport(), info_.accounts());
  }
  member_layout_ =
      any(params_, &ParamMeta::is_encoded)
          ? std::make_unique<PackedLayout>(member_extents_of(params_), shards_.grid().inner_ranks)
          : nullptr;
  if (neighbours_) set_neighbours(neighbours_);
}

const PackedLayout& UnshardedParams::gathered_layout() const {
  return inner_shards_ ? inner_shards_->layout() : layout_of_shards();
}

// On the places of their grid, as they are gathered.
const PackedLayout& UnshardedParams::layout_of_shards() const {
  if (inner_shards_) return inner_shards_->layout_of_pieces();
  return staging_ ? staging_->layout() : shards_.layout();
}

void UnshardedParams::check_has_values() const {
  if (shards_.has_values()) return;
  std::vector<std::string> names;
  for (const auto& param : params_) names.push_back(param.name());
  TORCH_CHECK_VALUE(false, "the parameters of unit '", info_.name(),
                    "' have no values yet, since fully_shard met them on the meta device: '",
                    c10::Join("', '", names),
                    "'. Call fsdp::materialize(model) first, and load files after it (rank ",
                    info_.rank(), ")");
}

// The issuer of a gather waits for what streams still write to the shards: by an
// optimizer (set_post_optim_event()), and from members.
void UnshardedParams::await_writers_of_shards() {
  const auto issuer = DeviceStream::current(shards_.member_device());
  if (const auto event = info_.unit().root()->take_gather_after()) issuer.wait(*event);
  wrote_shards_.are_awaited_by(issuer, StreamWait::kGatherAfterWriteBack);
  wrote_shards_.clear();
}

void UnshardedParams::issue_inner_shards(NoticeWords words) {
  if (!inner_shards_ || !inner_shards_->are_to_be_issued()) return;
  await_writers_of_shards();
  inner_shards_->issue(words, layouts_);
}

void UnshardedParams::shards_change() {
  if (inner_shards_) inner_shards_->pieces_change();
}

GatherFrom UnshardedParams::gather_from() const {
  if (state_.is_sharded_post_forward()) return GatherFrom::kNeighbours;
  if (inner_shards_) return GatherFrom::kInnerShards;
  if (staging_) return GatherFrom::kStaged;
  const bool can_read = shards_.shared() != nullptr && !info_.unit().custom.all_gather;
  return can_read ? GatherFrom::kRead : GatherFrom::kShards;
}

// " (codes: the first parameter is 'weight' as MXFP8)".
std::string UnshardedParams::codes_in_words() const {
  const auto first = std::find_if(params_.begin(), params_.end(), [](const FSDPParam& param) {
    return param.meta().codec() != nullptr;
  });
  return " (codes: the first parameter is '" + first->name() + "' as " +
         first->meta().codec()->name + ")";
}

// REQUIRES: not kRead, which sends nothing.
PackedRow UnshardedParams::row_to_send(GatherFrom from) {
  if (from == GatherFrom::kNeighbours) return part_->row();
  if (from == GatherFrom::kInnerShards) return inner_shards_->row();
  if (from == GatherFrom::kStaged) return stage(*staging_, shards_, params_, failure_);
  auto& transport = info_.comm_context().transport();
  return {transport, shards_.layout(), shards_.row(transport)};
}

void UnshardedParams::issue(NoticeWords words) {
  await_writers_of_shards();
  gather_count_.gathered();
  from_ = gather_from();
  if (from_ == GatherFrom::kRead) return issue_read();
  const auto row = row_to_send(from_);
  const bool may_be_custom = from_ != GatherFrom::kNeighbours;
  if (from_ == GatherFrom::kStaged) words = failure_.words(words);
  auto issue = info_.issue(words, may_be_custom ? &info_.unit().custom.all_gather : nullptr);
  if (sends_codes()) issue.form = codes_in_words();
  if (layouts_ == Layouts::kAgreed) issue.lengths = row.layout.lengths();
  const auto bytes = (row.transport.shard_count() - 1) * row.layout.row_bytes();
  const ProfilerRange range("all_gather", info_.name(), bytes);
  gather_.start(row, issue);
  info_.accounts().add(&Counters::all_gather_bytes, bytes);
  state_.gather_issued();
}

void UnshardedParams::issue_read() {
  const auto ranks = info_.comm_context().shard_count();
  const auto bytes = (ranks - 1) * shards_.layout().row_bytes();
  const ProfilerRange range("all_gather", info_.name(), bytes);
  const auto what = "read of the shards of " + in_words(info_.issue({}));
  gather_.start_read(shards_.shared()->read(what, read_by(shards_, params_)), shards_.layout(),
                     ranks);
  info_.accounts().add(&Counters::all_gather_bytes, bytes);
  state_.gather_issued();
}

Gathered UnshardedParams::wait() {
  Gathered gathered{.from = from_};
  try {
    GatheredRows rows;
    do {
      rows = gather_.wait();
      if (from_ == GatherFrom::kStaged)
        failure_.check(rows.words(), info_.comm_context().transport().gathers(),
                       "unit '" + info_.name() + "' was not gathered");
      fill_from(rows);
    } while (gather_.read() != nullptr && !gather_.read()->was_right());
    gathered.words = rows.words();
    if (gather_.read() != nullptr) gathered.tables = gather_.read()->other_tables();
    streams_.ready(DeviceStream::current(shards_.member_device()));
    gather_.rows_were_read(streams_.when_ready());
  } catch (...) {
    streams_.free();
    in_place_.reset();
    bytes_.reset();
    drop_codes();
    gather_.drop();
    is_sharded_again();
    throw;
  }
  show();
  gather_.release();
  state_.filled();
  if (staging_) staging_->free();
  writes_.copy_filled();
  drop_part();
  return gathered;
}

void UnshardedParams::fill_from(const GatheredRows& rows) {
  in_place_ = gather_.read() != nullptr ? gather_.read()->in_place() : nullptr;
  if (in_place_) {
    bytes_ = in_place_->bytes();
    return;
  }
  bytes_.reset();
  bytes_ =
      scratch_memory({layout().bytes(Arrangement::kCommon)}, at::kByte, shards_.member_device());
  if (!sends_codes()) return unpack_rows(gather_.rows(rows), {bytes_, layout()});
  codes_ = scratch_memory({gathered_layout().bytes(Arrangement::kCommon)}, at::kByte,
                          shards_.member_device());
  info_.accounts().add(&Counters::staging_bytes, codes_.numel());
  unpack_rows(gather_.rows(rows), {codes_, gathered_layout()});
}

void UnshardedParams::agreed(Layouts layouts) {
  if (layouts == Layouts::kAgreed) layouts_ = layouts;
  if (!codes_.defined()) return;
  internal::decode({codes_, gathered_layout()}, {bytes_, layout()}, params_);
  drop_codes();
  streams_.ready(DeviceStream::current(shards_.member_device()));
}

void UnshardedParams::drop_codes() {
  if (!codes_.defined()) return;
  info_.accounts().add(&Counters::staging_bytes, -codes_.numel());
  codes_.reset();
}

void UnshardedParams::show() {
  count_shown(1);
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].storage() != nullptr) params_[i].storage()->fill(data(static_cast<int64_t>(i)));
  }
}

void UnshardedParams::count_shown(int64_t sign) const {
  info_.accounts().add(in_place_ ? &Counters::in_place_bytes : &Counters::unsharded_bytes,
                       sign * bytes_.numel());
}

// A gather was dropped, or has failed. What may throw below is a broken invariant, which
// ends the process here.
// NOLINTNEXTLINE(bugprone-exception-escape)
void UnshardedParams::is_sharded_again() noexcept {
  state_.gather_dropped();
  if (staging_) staging_->free();
  info_.unit().root()->schedule().emptied(info_.unit().id);
}

void UnshardedParams::drop_gather() noexcept {
  if (!state_.is_gathering()) return;
  gather_.drop();
  info_.accounts().count(&Counters::unused_prefetches);
  is_sharded_again();
}

void UnshardedParams::await_and_drop_gather() {
  const RuntimeMode runtime_mode;
  try {
    gather_.await_and_drop();
  } catch (...) {
    is_sharded_again();
    throw;
  }
  info_.accounts().count(&Counters::unused_prefetches);
  is_sharded_again();
}

}  // namespace fsdp::internal
