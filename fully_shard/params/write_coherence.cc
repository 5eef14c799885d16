#include "fully_shard/params/write_coherence.h"

#include "device_mesh/debug.h"
#include "dtensor/dispatch/compare_plain.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "dtensor/tensor/value_hash.h"
#include "fully_shard/params/runtime_mode.h"
#include "fully_shard/units/unit.h"
#include "fully_shard/units/unit_events.h"
#include "on_demand/on_demand_storage.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <utility>

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

WriteCoherence::WriteCoherence(const GroupInfo& info, std::vector<FSDPParam>& params,
                               const ShardBuffer& shards, ShardWrites& writes,
                               UnshardedParams& unsharded, RankAgreement& agreement,
                               Touchable& users)
    : info_(info),
      params_(params),
      shards_(shards),
      newest_(writes),
      unsharded_(unsharded),
      agreement_(agreement),
      users_(users),
      shard_versions_(params.size()) {}

// Start values need not be alike where the first thing done to them is a write. A gather
// in flight compares what it was issued with.
void WriteCoherence::before_member_write(int64_t index) {
  TORCH_CHECK_VALUE(!param(index).meta().is_stored_as_codes(), "write to the member of parameter '",
                    param(index).name(),
                    "', which is stored as codes (store_codes()): write before that, or load codes "
                    "into its registry entry (rank ",
                    info_.rank(), ")");
  if (unsharded_.state().is_sharded()) values().note_write(static_cast<size_t>(index));
}

void WriteCoherence::member_written(int64_t index) {
  if (unsharded_.state().is_never_sharded()) return;
  unsharded_.leave_shards();
  newest_.copy_written(static_cast<size_t>(index));
  users_.clear_ready();
  tell_unit_observer(&UnitObserver::member_written, info_.unit());
}

void WriteCoherence::flush_member_writes() {
  if (!newest_.is_dirty() || unsharded_.state().is_held()) return;
  write_back();
  unsharded_.empty();
}

void WriteCoherence::write_back() {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!newest_.is_dirty(i)) continue;
    const auto index = static_cast<int64_t>(i);
    values().note_member_write(i, unsharded_.data(index),
                               unsharded_.layout().chunk(index).extent.nbytes(),
                               shards_.member_device());
  }
  write_back_own_parts();
}

void WriteCoherence::write_back_own_parts() {
  if (!newest_.is_dirty()) return;
  const RuntimeMode runtime_mode;
  if (!std::exchange(is_writing_back_, false)) begin_shard_write();
  for (const auto i : newest_.write_back()) {
    unsharded_.copy_to_shard(static_cast<int64_t>(i));
    agreement_.shard_written(static_cast<int64_t>(i));
    const auto entry = params_[i].entry();
    if (entry.defined()) entry.unsafeGetTensorImpl()->bump_version();
  }
  after_write();
}

void WriteCoherence::begin_shard_write() {
  unsharded_.leave_shards();
  unsharded_.shards_change();
  auto* const shared = shards_.shared();
  if (shared != nullptr) shared->begin_write([this] { return in_words(info_.issue({})); });
}

void WriteCoherence::after_write() {
  auto* const shared = shards_.shared();
  if (shared == nullptr) return;
  const auto word = values().word();
  shared->end_write(word == 0 ? ShardValues{} : ShardValues{word, values().table()});
}

void WriteCoherence::shard_given_out() {
  if (auto* const shared = shards_.shared()) shared->give_out();
}

void WriteCoherence::shards_filled() {
  std::fill(shard_versions_.begin(), shard_versions_.end(), std::nullopt);
  unsharded_.shards_change();
  after_write();
  if (auto* const shared = shards_.shared()) shared->end_of_start();
}

void WriteCoherence::note_raw_writes() {
  const bool can_compare =
      shards_.member_device().is_cpu() && !any(params_, &ParamMeta::is_converted);
  if (!debug_options().write_checks || newest_.is_stale() || !can_compare) return;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (newest_.is_dirty(i) || params_[i].storage() == nullptr) continue;
    const auto index = static_cast<int64_t>(i);
    if (!shards_.has_part_of(index, unsharded_.data(index)))
      info_.unit().root()->raw_writes().note(params_[i].name());
  }
}

void WriteCoherence::before_read(int64_t index) {
  users_.await_failed_backward();
  unsharded_.check_has_values();
  if (!newest_.is_dirty(static_cast<size_t>(index)) || unsharded_.state().is_held()) return;
  const RuntimeMode runtime_mode;
  if (!std::exchange(is_writing_back_, true)) begin_shard_write();
  unsharded_.copy_to_shard(index);
}

void WriteCoherence::before_write(int64_t index) {
  users_.await_failed_backward();
  unsharded_.check_has_values();
  const auto& state = unsharded_.state();
  TORCH_CHECK_VALUE(
      !state.is_held() || state.is_never_sharded(), "write to the registry entry of parameter '",
      param(index).name(),
      "' while its unit is held unsharded (SummonFullParams, Unsharded): write to the "
      "member instead, or end that scope first (rank ",
      info_.rank(), ")");
  shard_versions_[static_cast<size_t>(index)].reset();
  const auto member = param(index).member();
  if (member.defined()) member.unsafeGetTensorImpl()->bump_version();
  if (state.is_never_sharded()) return;
  if (state.is_gathering()) unsharded_.await_and_drop_gather();
  unsharded_.drop_part();
  shards_.await_copies();
  if (newest_.is_dirty()) write_back();
  begin_shard_write();
  values().note_write(static_cast<size_t>(index));
  agreement_.shard_written(index);
  newest_.shard_written();
  users_.clear_ready();
  tell_unit_observer(&UnitObserver::entry_written, info_.unit());
  // Nothing may read the copy any more, so its memory goes, unless an operator is at it.
  if (!users_.pinned()) unsharded_.empty_if_stale();
}

void WriteCoherence::before_factors(int64_t index, uint64_t hash) {
  if (!info_.is_alone()) values().note_factors(static_cast<size_t>(index), hash);
}

void WriteCoherence::after_overwrite(int64_t index, const at::Tensor& written,
                                     const at::Tensor& source) {
  values().note_overwrite(static_cast<size_t>(index));
  const RuntimeMode runtime_mode;
  if (source.defined()) note_copy(index, source.expand(written.sizes()));
}

void WriteCoherence::remade(int64_t index, const at::Tensor& whole) {
  values().note_overwrite(static_cast<size_t>(index));
  note_copy(index, whole);
  agreement_.shard_written(index);
  newest_.shard_written();
  shards_filled();
}

// Of the values as the parameter has them, whatever it was given. What members hold was
// compared, and hashing on a device would stall the host.
void WriteCoherence::note_copy(int64_t index, const at::Tensor& whole) {
  const bool is_plain = counts_as_replicated(whole) && OnDemandStorage::behind(whole) == nullptr;
  if (info_.is_alone() || !is_plain || !shards_.member_device().is_cpu() || !whole.is_cpu()) return;
  values().note_copy(static_cast<size_t>(index), hash_in_dtype(whole, param(index).meta().dtype()));
}

void WriteCoherence::check_graph_is_current(Pass pass) const {
  TORCH_CHECK(pass != Pass::kBackward || newest_.graph_is_current(), "backward through unit '",
              info_.name(), "' whose parameters (the first is '", params_.front().name(),
              "') were written after the forward that recorded this graph, so its gradients would "
              "be wrong; run the forward again after the optimizer step (rank ",
              info_.rank(), "; every rank that writes and runs backward fails alike)");
}

void WriteCoherence::check_shards_are_announced() {
  for (size_t i = 0; i < params_.size(); ++i) {
    const auto entry = params_[i].entry();
    if (!entry.defined()) continue;
    const auto version = local_version_of(entry);
    const auto seen = std::exchange(shard_versions_[i], version);
    TORCH_CHECK(!seen || *seen == version, "the shard of parameter '", params_[i].name(),
                "' was written through an alias (to_local()), which nothing announced, so "
                "unsharded copies are stale. Write through the registry entry, or call "
                "fsdp::mark_shard_written(parameter) on every rank (rank ",
                info_.rank(), ")");
  }
}

}  // namespace fsdp::internal
