#include "fully_shard/params/param_group.h"

#include "fully_shard/transport/packed_copy.h"
#include "fully_shard/transport/wait_clock.h"
#include "fully_shard/units/unit.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace fsdp::internal {
namespace {

class Pinned {
 public:
  explicit Pinned(OnDemandGroup& group) : group_(group) { group_.pin(); }
  ~Pinned() { group_.unpin(); }
  Pinned(const Pinned&) = delete;

 private:
  OnDemandGroup& group_;
};

// The runtime's own tensors are ordinary ones, whatever mode the user's code runs in.
struct RuntimeMode {
  c10::InferenceMode no_inference{false};
  c10::NoGradGuard no_grad;
};

}  // namespace

ParamGroup::ParamGroup(const DeviceMesh& mesh, std::shared_ptr<CommContext> context,
                       std::shared_ptr<Unit> unit)
    : mesh_(mesh),
      context_(std::move(context)),
      unit_(std::move(unit)),
      unit_number_(context_->next_unit_number()) {
  context_->schedule().add(*this);
}

ParamGroup::~ParamGroup() {
  unit_->group = nullptr;
  context_->backward().remove(*this);
  context_->schedule().remove(*this);
  if (gathered_.defined()) context_->account(&Counters::staging_bytes, -gathered_.numel());
  if (unsharded_.defined()) context_->account(&Counters::unsharded_bytes, -unsharded_.numel());
  if (shards_.defined()) context_->account(&Counters::sharded_bytes, -shards_.numel());
  drop_gradients();
}

void ParamGroup::release_resources() {
  for (auto& param : params_) param.tripwire.reset();
}

const std::string& ParamGroup::name() const {
  static const std::string root = "(root)";
  return unit_->name.empty() ? root : unit_->name;
}

char* ParamGroup::shard_data(int64_t index) const {
  return static_cast<char*>(shards_.data_ptr()) + layout_->chunk(index).offset;
}

char* ParamGroup::unsharded_data(int64_t index) const {
  return static_cast<char*>(unsharded_.data_ptr()) +
         context_->world() * layout_->chunk(index).offset;
}

void ParamGroup::synchronize_metadata(int64_t index, c10::TensorImpl* impl) {
  auto& param = params_[static_cast<size_t>(index)];
  if (!is_member(index, impl)) return;
  const auto entry = param.entry.lock();
  if (!entry || entry->requires_grad() == impl->requires_grad()) return;
  impl->set_requires_grad(entry->requires_grad());
}

void ParamGroup::storage_destroyed(int64_t index, const OnDemandStorage* storage) noexcept {
  auto& param = params_[static_cast<size_t>(index)];
  if (param.storage == storage) param.storage = nullptr;
}

void ParamGroup::check_graph_is_current(Pass pass) const {
  // Without a forward that recorded this group there is no graph: code under no_grad in a
  // recomputation reads it.
  if (!notes_.touched_in_forward) return;
  TORCH_CHECK(pass != Pass::kBackward || forward_writes_ == writes_, "backward through unit '",
              name(), "' whose parameters (the first is '", params_.front().name,
              "') were written after the forward that recorded this graph, so its gradients would "
              "be wrong; run the "
              "forward again after the optimizer step (rank ",
              context_->rank(), "; every rank that writes and runs backward fails alike)");
}

// A write through an alias of the local tensor, which no operator on the entry announced.
void ParamGroup::check_shards_are_announced() {
#ifndef NDEBUG
  for (auto& param : params_) {
    const auto entry = param.lock_entry();
    if (!entry.defined()) continue;
    const auto version = local_version_of(entry);
    const auto seen = std::exchange(param.shard_version, version);
    TORCH_CHECK(
        !seen || *seen == version, "the shard of parameter '", param.name,
        "' was written through an alias (to_local()), which nothing announced, so unsharded copies "
        "are stale. Write "
        "through the registry entry, or call fsdp::mark_written(parameter) on every rank (rank ",
        context_->rank(), ")");
  }
#endif
}

void ParamGroup::touch() {
  const auto pass = current_pass();
  if (context_->world() == 1) return;
  const ExclusiveUse use(context_->user());
  check_shards_are_announced();
  context_->raw_writes().raise(context_->rank());
  check_graph_is_current(pass);
  if (in_backward(pass)) context_->backward().note_backward(*this);
  if (records_gradients(pass)) {
    context_->backward().note_forward(*this);
    if (any_written() && !held()) {
      write_back();
      free_unsharded();
    }
    forward_writes_ = writes_;
  }
  const bool current = context_->schedule().is_current(*this, pass);
  if (current && unsharded() && !stale()) return;
  RuntimeMode runtime_mode;
  if (unsharded() && stale()) free_unsharded();
  issue_all_gather();
  if (!current) context_->schedule().advance(*this, pass);
  if (!unsharded()) {
    wait_and_copy_out();
    unsharded_in_ = pass;
  }
  if (!current) context_->schedule().prefetch();
  context_->raw_writes().raise(context_->rank());  // what advance() found
}

void ParamGroup::hold() {
  unshard();
  pin();
  ++holds_;
}

void ParamGroup::unshard() {
  if (context_->world() == 1) return;
  const ExclusiveUse use(context_->user());
  const Pinned pinned(*this);
  RuntimeMode runtime_mode;
  if (unsharded() && stale()) free_unsharded();
  issue_all_gather();
  if (!unsharded()) wait_and_copy_out();
}

void ParamGroup::release() {
  --holds_;
  unpin();
  if (!held()) reshard();
}

// After a failure nothing of the gather is left.
template <class Wait>
void ParamGroup::watch_gather(const Wait& wait) {
  try {
    context_->watch(wait);
  } catch (...) {
    discard_all_gather();
    throw;
  }
}

void ParamGroup::issue_all_gather() {
  if (context_->world() == 1 || unsharded() || gathered_.defined()) return;
  if (evict_after_every_operator() && !pinned())
    return;  // a prefetch: this mode is about touches only
  RECORD_FUNCTION("fsdp::all_gather(" + name() + ")", {});
  RuntimeMode runtime_mode;
  const auto bytes = shards_.numel();
  gather_stamp_ = context_->stamp_next(*this, CollectiveKind::kAllGather, bytes);
  if (shards_.is_cpu()) {
    std::memcpy(static_cast<char*>(shards_.data_ptr()) + layout_->row_bytes(), &gather_stamp_,
                sizeof gather_stamp_);
  }
  gathered_ = at::empty({context_->world(), bytes}, shards_.options());
  context_->account(&Counters::staging_bytes, gathered_.numel());
  gather_ = context_->transport().gather(gathered_.view({-1}), shards_);
  watch_gather([this] { gather_.throw_if_not_issued("all-gather of unit '" + name() + "'"); });
  ++context_->counters().all_gathers;
  if (!pinned()) ++context_->counters().prefetched_all_gathers;
}

void ParamGroup::wait_and_copy_out() {
  RECORD_FUNCTION("fsdp::all_gather_copy_out(" + name() + ")", {});
  {
    WaitClock clock(context_->counters());
    watch_gather([this] { gather_.wait("all-gather of unit '" + name() + "'"); });
  }
  const auto gathered = std::exchange(gathered_, {});
  context_->account(&Counters::unsharded_bytes, padded_bytes());
  unsharded_ = at::empty({padded_bytes()}, shards_.options());
  check_gathered_stamps(gathered);
  const auto* rows = static_cast<const char*>(gathered.const_data_ptr());
  for (size_t i = 0; i < params_.size(); ++i) {
    auto* const storage = params_[i].storage;
    if (storage == nullptr) continue;
    const auto index = static_cast<int64_t>(i);
    auto* const data = unsharded_data(index);
    copy_from_rows(rows, gathered.size(1), layout_->chunk(index), context_->world(), data,
                   shards_.device());
    storage->fill(data);
  }
  filled_writes_ = writes_;
  context_->account(&Counters::staging_bytes, -gathered.numel());
}

void ParamGroup::check_gathered_stamps(const at::Tensor& gathered) {
  if (!gathered.is_cpu()) return;
  std::vector<Stamp> stamps(static_cast<size_t>(gathered.size(0)));
  for (size_t rank = 0; rank < stamps.size(); ++rank) {
    const auto* row = static_cast<const char*>(gathered.const_data_ptr()) +
                      static_cast<int64_t>(rank) * gathered.size(1);
    std::memcpy(&stamps[rank], row + layout_->row_bytes(), sizeof(Stamp));
  }
  try {
    context_->check_stamps(gather_stamp_, stamps, name());
  } catch (...) {
    context_->account(&Counters::staging_bytes, -gathered.numel());
    free_unsharded();
    throw;
  }
}

bool ParamGroup::any_written() const {
  return std::any_of(params_.begin(), params_.end(),
                     [](const auto& param) { return param.written; });
}

void ParamGroup::mark_written(int64_t index) {
  if (context_->world() > 1) params_[static_cast<size_t>(index)].written = true;
}

void ParamGroup::mark_all_written() {
  for (size_t i = 0; i < params_.size(); ++i) mark_written(static_cast<int64_t>(i));
}

void ParamGroup::forget_writes() {
  for (auto& param : params_) param.written = false;
  filled_writes_ = kDiscarded;  // what was written must not be used, nor taken for a raw write
}

void ParamGroup::copy_to_shard(int64_t index) {
  const auto& chunk = layout_->chunk(index);
  const auto rank = context_->rank();
  copy_bytes(shard_data(index), unsharded_data(index) + chunk.first(rank), chunk.length(rank),
             shards_.device());
}

void ParamGroup::write_back() {
  RuntimeMode runtime_mode;
  for (size_t i = 0; i < params_.size(); ++i) {
    auto& param = params_[i];
    if (!std::exchange(param.written, false)) continue;
    copy_to_shard(static_cast<int64_t>(i));
    if (const auto entry = param.entry.lock()) entry->bump_version();
  }
  ++writes_;
}

void ParamGroup::note_raw_writes() {
  if (!RawWrites::kDetected || stale() || !shards_.is_cpu()) return;
  for (size_t i = 0; i < params_.size(); ++i) {
    const auto& param = params_[i];
    if (param.written || param.storage == nullptr) continue;
    const auto index = static_cast<int64_t>(i);
    const auto& chunk = layout_->chunk(index);
    const auto rank = context_->rank();
    const auto* shard = shard_data(index);
    if (!std::equal(shard, shard + chunk.length(rank), unsharded_data(index) + chunk.first(rank))) {
      context_->raw_writes().note(param.name);
    }
  }
}

void ParamGroup::reshard() {
  if (!unsharded() || pinned() || context_->world() == 1) return;
  note_raw_writes();
  if (any_written()) write_back();
  free_unsharded();
  ++context_->counters().reshards;
}

void ParamGroup::evict_and_poison() {
  if (!unsharded() || pinned() || context_->world() == 1) return;
  note_raw_writes();
  if (any_written()) write_back();
  if (unsharded_.is_cpu())
    std::fill_n(static_cast<char*>(unsharded_.data_ptr()), unsharded_.numel(), '\xff');
  poisoned_ = unsharded_;
  free_unsharded();
  ++context_->counters().reshards;
}

void ParamGroup::free_unsharded() {
  for (auto& param : params_) {
    if (param.storage != nullptr) param.storage->empty();
  }
  context_->account(&Counters::unsharded_bytes, -unsharded_.numel());
  unsharded_.reset();
}

void ParamGroup::discard_all_gather() noexcept {
  if (!gathered_.defined()) return;
  gather_ = {};  // waits
  context_->account(&Counters::staging_bytes, -gathered_.numel());
  gathered_.reset();
}

void ParamGroup::before_read(int64_t index) {
  if (!params_[static_cast<size_t>(index)].written || held()) return;
  RuntimeMode runtime_mode;
  copy_to_shard(index);
}

void ParamGroup::before_write(int64_t index) {
  auto& param = params_[static_cast<size_t>(index)];
  TORCH_CHECK_VALUE(!held() || context_->world() == 1, "write to the registry entry of parameter '",
                    param.name,
                    "' while its unit is held unsharded (SummonFullParams, Unsharded): write to "
                    "the member instead (rank ",
                    context_->rank(), ")");
  param.shard_version.reset();
  if (const auto member = param.member.lock()) member->bump_version();
  if (context_->world() == 1) return;
  if (gathered_.defined()) {
    watch_gather([&] {
      gather_.wait("all-gather of unit '" + name() + "', before a write to parameter '" +
                   param.name + "'");
    });
    discard_all_gather();
  }
  if (any_written()) write_back();
  ++writes_;
}

void ParamGroup::rename(const std::string& prefix) {
  for (auto& param : params_) {
    param.name = prefix + param.name;
    if (param.storage != nullptr && !unsharded() && context_->world() > 1) param.storage->empty();
  }
}

bool ParamGroup::reshards_after_forward() const {
  const auto& policy = unit_->reshard_after_forward;
  return policy ? policy->reshards() : !unit_->is_root();
}

bool ParamGroup::reshards_after_backward() const { return unit_->reshard_after_backward; }
bool ParamGroup::prefetched_in_backward() const { return unit_->prefetch_in_backward; }

std::vector<ParamGroup*> ParamGroup::explicit_prefetch(bool backward) const {
  std::vector<ParamGroup*> groups;
  for (const auto& weak : backward ? unit_->backward_prefetch : unit_->forward_prefetch) {
    const auto unit = weak.lock();
    if (unit && unit->group != nullptr) groups.push_back(unit->group);
  }
  return groups;
}

bool ParamGroup::related_to(const ParamGroup& other) const {
  return unit_->is_ancestor_of(*other.unit_) || other.unit_->is_ancestor_of(*unit_);
}

}  // namespace fsdp::internal
