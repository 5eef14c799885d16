#include "fully_shard/params/param_group.h"

#include "fully_shard/params/runtime_mode.h"
#include "fully_shard/transport/packed_copy.h"
#include "fully_shard/units/root.h"
#include "fully_shard/units/unit_events.h"
#include "fully_shard/units/write_checks.h"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {

ParamGroup::ParamGroup(const DeviceMesh& mesh, std::shared_ptr<ShardDim> dim,
                       std::shared_ptr<Unit> unit, std::shared_ptr<GroupDriver> driver,
                       std::vector<ShardedParam> params)
    : mesh_(mesh),
      dim_(std::move(dim)),
      unit_(std::move(unit)),
      driver_(std::move(driver)),
      number_(dim_->next_unit_number()),
      params_(std::move(params)),
      accounts_(dim_, unit_),
      copy_(*dim_, accounts_),
      writes_(params_.size()),
      agreed_(params_.size()),
      gradients_(*this, params_, accounts_) {
  unit_->group = this;
  unit_->root->groups[unit_->id] = this;
}

ParamGroup::~ParamGroup() {
  unit_->group = nullptr;
  unit_->root->groups.erase(unit_->id);
  unit_->root->schedule.emptied(unit_->id);
  driver_->destroyed(*this);
}

void ParamGroup::release_resources() {
  for (auto& param : params_) param.release_tripwire();
}

const std::string& ParamGroup::name() const {
  static const std::string root = "(root)";
  return unit_->name.empty() ? root : unit_->name;
}

void ParamGroup::rename(const std::function<std::string(const std::string& name)>& renamed) {
  for (auto& param : params_) {
    param.rename(renamed(param.name()));
    // An empty storage's error has the parameter's name.
    if (param.storage() != nullptr && (residency().is_sharded() || residency().is_gathering())) {
      param.storage()->empty();
    }
  }
}

void ParamGroup::touch() {
  if (!residency().is_borrowed()) driver_->touched(*this);
}

void ParamGroup::synchronize_metadata(int64_t index, c10::TensorImpl* impl) {
  if (is_member(index, impl)) param(index).synchronize_requires_grad();
}

bool ParamGroup::is_member(int64_t index, const c10::TensorImpl* impl) const {
  return params_[static_cast<size_t>(index)].is_member(impl);
}

const std::string& ParamGroup::parameter_name(int64_t index) const {
  return params_[static_cast<size_t>(index)].name();
}

void ParamGroup::storage_destroyed(int64_t index, const OnDemandStorage* storage) noexcept {
  param(index).storage_destroyed(storage);
}

void ParamGroup::mark_written(int64_t index) {
  if (residency().is_borrowed()) return;
  writes_.copy_written(static_cast<size_t>(index));
  unsettle();
  tell_unit_observer(&UnitObserver::member_written, *unit_);
}

void ParamGroup::mark_all_written() {
  for (size_t i = 0; i < params_.size(); ++i) mark_written(static_cast<int64_t>(i));
}

void ParamGroup::forget_writes() { writes_.copy_discarded(); }

Issue ParamGroup::issue(uint64_t agreement) const {
  return {.unit = number_, .unit_name = name(), .agreement = agreement};
}

void ParamGroup::prefetch() {
  issue_gather();
  if (residency().is_gathering()) unit_->root->schedule.unsharded(unit_->id);
}

void ParamGroup::discard_prefetch() {
  if (!residency().is_gathering()) return;
  drop_gather();
  accounts_.count(&Counters::unused_prefetches);
}

void ParamGroup::issue_gather() {
  if (!residency().is_sharded()) return;
  if (evict_after_every_operator() && !pinned()) return;  // a prefetch: that mode is about touches
  RECORD_FUNCTION("fsdp::all_gather(" + name() + ")", {});
  const RuntimeMode runtime_mode;
  copy_.issue(dim_->transport(), *shards_, issue(agreed_.word()));
  accounts_.count(&Counters::all_gathers);
  if (!pinned()) accounts_.count(&Counters::prefetched_all_gathers);
}

void ParamGroup::fill() {
  if (!residency().is_gathering()) return;
  RECORD_FUNCTION("fsdp::all_gather_copy_out(" + name() + ")", {});
  const auto word = agreed_.word();
  const auto words = gathered_words();
  writes_.copy_filled();
  const bool agree =
      std::all_of(words.begin(), words.end(), [word](uint64_t other) { return other == word; });
  if (agree) return agreed_.agreed();
  empty_copy();
  std::vector<std::string> names;
  for (const auto& param : params_) names.push_back(param.name());
  agreed_.report(mesh_, names);
}

std::vector<uint64_t> ParamGroup::gathered_words() {
  try {
    return copy_.fill(*shards_, params_);
  } catch (...) {
    unit_->root->schedule.emptied(unit_->id);
    throw;
  }
}

void ParamGroup::drop_gather() noexcept {
  if (!residency().is_gathering()) return;
  copy_.drop_gather();
  unit_->root->schedule.emptied(unit_->id);
}

void ParamGroup::unshard_async() {
  if (residency().is_borrowed()) return;
  const ExclusiveUse use(dim_->user());
  empty_if_stale();
  issue_gather();
  if (!residency().is_sharded()) unit_->root->schedule.unsharded_by_hand(unit_->id);
}

void ParamGroup::unshard() {
  if (residency().is_borrowed()) return;
  const ExclusiveUse use(dim_->user());
  const RuntimeMode runtime_mode;
  pin();
  try {
    empty_if_stale();
    issue_gather();
    fill();
  } catch (...) {
    unpin();
    throw;
  }
  unpin();
  unit_->root->schedule.unsharded_by_hand(unit_->id);
}

bool ParamGroup::may_be_emptied() const {
  return residency().is_resident() && !pinned() && !residency().is_held();
}

void ParamGroup::reshard() {
  if (!may_be_emptied()) return;
  note_raw_writes();
  if (writes_.is_dirty()) write_back();
  empty_copy();
  accounts_.count(&Counters::reshards);
}

void ParamGroup::evict_and_poison() {
  if (!may_be_emptied()) return;
  note_raw_writes();
  if (writes_.is_dirty()) write_back();
  copy_.poison();
  empty_copy();
  accounts_.count(&Counters::reshards);
}

void ParamGroup::empty_copy() {
  copy_.empty(params_);
  writes_.copy_emptied();
  unsettle();
  unit_->root->schedule.emptied(unit_->id);
}

void ParamGroup::empty_if_stale() {
  if (residency().is_resident() && !residency().is_held() && writes_.is_stale()) empty_copy();
}

void ParamGroup::settle_member_writes() {
  if (!writes_.is_dirty() || residency().is_held()) return;
  write_back();
  empty_copy();
}

void ParamGroup::hold() {
  unshard();
  copy_.hold();
}

void ParamGroup::release() {
  copy_.release();
  if (!residency().is_held()) reshard();
}

void ParamGroup::copy_to_shard(int64_t index) {
  copy_bytes(shards_->data(index), copy_.data(*shards_, index) + shards_->first(index),
             shards_->length(index), device());
}

void ParamGroup::write_back() {
  const RuntimeMode runtime_mode;
  for (const auto i : writes_.write_back()) {
    const auto index = static_cast<int64_t>(i);
    agreed_.note_member_write(i, copy_.data(*shards_, index),
                              shards_->layout().chunk(index).total_bytes, device());
    copy_to_shard(index);
    const auto entry = params_[i].entry();
    if (entry.defined()) entry.unsafeGetTensorImpl()->bump_version();
  }
}

void ParamGroup::note_raw_writes() {
  if (!write_checks() || writes_.is_stale() || !device().is_cpu()) return;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (writes_.is_dirty(i) || params_[i].storage() == nullptr) continue;
    const auto index = static_cast<int64_t>(i);
    const auto* shard = shards_->data(index);
    const auto* copy = copy_.data(*shards_, index) + shards_->first(index);
    if (!std::equal(shard, shard + shards_->length(index), copy)) {
      unit_->root->raw_writes.note(params_[i].name());
    }
  }
}

void ParamGroup::before_read(int64_t index) {
  if (!writes_.is_dirty(static_cast<size_t>(index)) || residency().is_held()) return;
  const RuntimeMode runtime_mode;
  copy_to_shard(index);
}

void ParamGroup::before_write(int64_t index) {
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
  const RuntimeMode runtime_mode;
  if (residency().is_gathering()) {
    copy_.await_and_drop();
    unit_->root->schedule.emptied(unit_->id);
  }
  dim_->transport().before_shard_write();
  if (writes_.is_dirty()) write_back();
  agreed_.note_shard_write(static_cast<size_t>(index));
  writes_.shard_written();
  unsettle();
  tell_unit_observer(&UnitObserver::entry_written, *unit_);
  // Nothing may read the copy any more, so its memory goes, unless an operator is at it.
  if (!pinned()) empty_if_stale();
}

void ParamGroup::graph_recorded() {
  writes_.graph_recorded();
  for (auto& param : params_) param.remove_tripwire();
}

void ParamGroup::check_graph_is_current(Pass pass) const {
  TORCH_CHECK(pass != Pass::kBackward || writes_.graph_is_current(), "backward through unit '",
              name(), "' whose parameters (the first is '", params_.front().name(),
              "') were written after the forward that recorded this graph, so its gradients would "
              "be wrong; run the forward again after the optimizer step (rank ",
              dim_->global_rank(), "; every rank that writes and runs backward fails alike)");
}

void ParamGroup::check_shards_are_announced() {
  for (auto& param : params_) param.check_shard_is_announced(dim_->global_rank());
}

}  // namespace fsdp::internal
