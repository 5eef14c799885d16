// How what is written to members reaches the shards, and the other way round.
#include "device_mesh/debug.h"
#include "dtensor/dispatch/compare_plain.h"
#include "dtensor/tensor/value_hash.h"
#include "fully_shard/params/param_group.h"
#include "fully_shard/params/runtime_mode.h"
#include "fully_shard/units/root.h"
#include "fully_shard/units/unit_events.h"
#include "on_demand/on_demand_storage.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace fsdp::internal {
namespace {

// Of the values as a parameter of `dtype` has them, some rows at a time: what is
// converted, or expanded to the parameter's shape, would need the memory of the whole
// parameter.
uint64_t hash_in_dtype(const at::Tensor& whole, c10::ScalarType dtype) {
  constexpr int64_t kElements = int64_t{1} << 20;
  if (whole.dim() == 0) return hash_of_values(whole.to(dtype), /*seed=*/0);
  const int64_t rows = whole.size(0);
  const int64_t step = std::max<int64_t>(1, kElements * rows / std::max<int64_t>(1, whole.numel()));
  uint64_t hash = 0;
  for (int64_t row = 0; row < rows; row += step) {
    const auto some = whole.narrow(0, row, std::min(step, rows - row));
    hash = hash_of_values(some.to(dtype), hash);
  }
  return hash;
}

}  // namespace

void ParamGroup::mark_written(int64_t index) {
  if (residency().is_borrowed()) return;
  writes_.copy_written(static_cast<size_t>(index));
  unsettle();
  tell_unit_observer(&UnitObserver::member_written, *unit_);
}

// Start values need not be alike where the first thing done to them is a write.
void ParamGroup::announce_write(int64_t index) {
  // A gather in flight compares what it was issued with.
  if (residency().is_sharded()) agreed_.note_write(static_cast<size_t>(index));
}

void ParamGroup::mark_all_written() {
  for (size_t i = 0; i < params_.size(); ++i) mark_written(static_cast<int64_t>(i));
}

void ParamGroup::forget_writes() { writes_.copy_discarded(); }

void ParamGroup::settle_member_writes() {
  if (!writes_.is_dirty() || residency().is_held()) return;
  write_back();
  empty_copy();
}

void ParamGroup::copy_to_shard(int64_t index) {
  if (!staged_row_) return shards_->take_part(index, copy_.data(member_layout(), index));
  const auto& written = param(index);
  const auto part =
      copy_.elements(member_layout(), index, dim_->shard_rank(), written.member_dtype());
  shards_->elements(index, written).view(part.sizes()).copy_(part);
}

void ParamGroup::write_back() {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!writes_.is_dirty(i)) continue;
    const auto index = static_cast<int64_t>(i);
    agreed_.note_member_write(i, copy_.data(member_layout(), index),
                              member_layout().chunk(index).extent.nbytes(), device());
  }
  write_back_own_parts();
}

void ParamGroup::write_back_own_parts() {
  if (!writes_.is_dirty()) return;
  const RuntimeMode runtime_mode;
  dim_->transport().before_shard_write();
  for (const auto i : writes_.write_back()) {
    copy_to_shard(static_cast<int64_t>(i));
    shard_is_written(static_cast<int64_t>(i));
    const auto entry = params_[i].entry();
    if (entry.defined()) entry.unsafeGetTensorImpl()->bump_version();
  }
}

void ParamGroup::note_raw_writes() {
  if (!debug_options().write_checks || writes_.is_stale() || !device().is_cpu() || casts()) return;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (writes_.is_dirty(i) || params_[i].storage() == nullptr) continue;
    const auto index = static_cast<int64_t>(i);
    if (!shards_->has_part_of(index, copy_.data(member_layout(), index)))
      unit_->root->raw_writes.note(params_[i].name());
  }
}

void ParamGroup::before_read(int64_t index) {
  check_has_values();
  if (!writes_.is_dirty(static_cast<size_t>(index)) || residency().is_held()) return;
  const RuntimeMode runtime_mode;
  dim_->transport().before_shard_write();
  copy_to_shard(index);
}

void ParamGroup::await_unused_gather() {
  const RuntimeMode runtime_mode;
  copy_.await_and_drop();
  drop_staged_row();
  accounts_.count(&Counters::unused_prefetches);
  unit_->root->schedule.emptied(unit_->id);
}

void ParamGroup::before_write(int64_t index) {
  check_has_values();
  TORCH_CHECK_VALUE(
      !residency().is_held() || residency().is_borrowed(),
      "write to the registry entry of parameter '", parameter_name(index),
      "' while its unit is held unsharded (SummonFullParams, Unsharded): write to the "
      "member instead, or end that scope first (rank ",
      dim_->global_rank(), ")");
  param(index).note_shard_written();
  const auto member = param(index).member();
  if (member.defined()) member.unsafeGetTensorImpl()->bump_version();
  if (residency().is_borrowed()) return;
  if (residency().is_gathering()) await_unused_gather();
  drop_post_forward_shards();
  dim_->transport().before_shard_write();
  if (writes_.is_dirty()) write_back();
  agreed_.note_write(static_cast<size_t>(index));
  shard_is_written(index);
  writes_.shard_written();
  unsettle();
  tell_unit_observer(&UnitObserver::entry_written, *unit_);
  // Nothing may read the copy any more, so its memory goes, unless an operator is at it.
  if (!pinned()) empty_if_stale();
}

void ParamGroup::before_factors(int64_t index, uint64_t hash) {
  if (!is_alone()) agreed_.note_factors(static_cast<size_t>(index), hash);
}

void ParamGroup::after_overwrite(int64_t index, const at::Tensor& written,
                                 const at::Tensor& source) {
  agreed_.note_overwrite(static_cast<size_t>(index));
  const RuntimeMode runtime_mode;
  if (source.defined()) note_copy(index, source.expand(written.sizes()));
}

// Of the values as the parameter has them, whatever it was given. What members hold was
// compared, and hashing on a device would stall the host.
void ParamGroup::note_copy(int64_t index, const at::Tensor& whole) {
  const bool is_plain = counts_as_replicated(whole) && OnDemandStorage::behind(whole) == nullptr;
  if (is_alone() || !is_plain || !device().is_cpu() || !whole.is_cpu()) return;
  agreed_.note_copy(static_cast<size_t>(index), hash_in_dtype(whole, param(index).dtype()));
}

}  // namespace fsdp::internal
