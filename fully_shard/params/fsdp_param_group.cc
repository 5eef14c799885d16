#include "fully_shard/params/fsdp_param_group.h"

#include "device_mesh/internal/profiler_range.h"
#include "fully_shard/params/runtime_mode.h"
#include "fully_shard/params/sharded_grad.h"
#include "fully_shard/units/unit.h"
#include "on_demand/pass.h"

#include <exception>
#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

class Pinned {
 public:
  explicit Pinned(Touchable& group) : group_(group) { group_.pin(); }
  ~Pinned() { group_.unpin(); }
  Pinned(const Pinned&) = delete;

 private:
  Touchable& group_;
};

bool is_never_sharded(const FSDPParamGroup& group) {
  return group.unsharded().state().is_never_sharded();
}

// The schedule keeps the unit for its next turn.
void asked_for_explicitly(FSDPParamGroup& group) {
  group.clear_ready();
  const auto& unit = group.info().unit();
  unit.root()->schedule().unsharded_explicitly(unit.id);
}

}  // namespace

FSDPParamGroup::FSDPParamGroup(GroupInfo info, std::vector<FSDPParam> params, c10::Device device)
    : OnDemandGroup(info.driver().open_backward()),
      info_(std::move(info)),
      params_(std::move(params)),
      shards_(params_, info_.comm_context(),
              {.device = device,
               .home = location_of_shards(info_.unit().offload, info_.mesh().device_type()),
               .access = info_.replicas() ? ShardAccess::kGathered : ShardAccess::kRead,
               .grid = info_.grid()},
              info_.accounts()),
      unsharded_(info_, params_, shards_, *shard_writes_, *this),
      agreement_(info_, params_, shards_),
      writes_(info_, params_, shards_, *shard_writes_, unsharded_, agreement_, *this),
      gradients_(info_, params_, shards_, shard_writes_) {
  info_.unit().attach(*this);
}

FSDPParamGroup::~FSDPParamGroup() {
  try {
    await_failed_backward();
  } catch (const std::exception&) {
    // Another thread is really in one, and learns that the group is gone.
  }
  info_.unit().detach_group();
  info_.driver().destroyed(*this);
}

void FSDPParamGroup::touch() {
  const bool is_on_device = !shards_.member_device().is_cpu();
  if (is_on_device && is_ready_but_for_stream(current_pass())) return unsharded_.use();
  unsharded_.check_has_values();
  if (!unsharded_.state().is_never_sharded()) {
    info_.driver().make_current(*this);
    return unsharded_.use();
  }
  // As graph_recorded() does: else a backward would add to them, for which
  // tensor-parallel ranks send.
  if (gradients_.unsharded().has_left_tripwires() && records_gradients(current_pass()))
    gradients_.unsharded().remove_tripwires();
}

void FSDPParamGroup::synchronize_metadata(int64_t index, c10::TensorImpl* impl) {
  if (is_member(index, impl)) params_[static_cast<size_t>(index)].synchronize_requires_grad();
}

bool FSDPParamGroup::is_member(int64_t index, const c10::TensorImpl* impl) const {
  return params_[static_cast<size_t>(index)].is_member(impl);
}

const std::string& FSDPParamGroup::parameter_name(int64_t index) const {
  return params_[static_cast<size_t>(index)].name();
}

at::Tensor FSDPParamGroup::gradient_share(int64_t index, const at::Tensor& gradient) const {
  const auto& home = params_[static_cast<size_t>(index)].meta().member_spec();
  return home ? tensor_parallel_share(gradient, info_.mesh(), home->mesh())
              : internal::gradient_share(gradient, info_.mesh());
}

void FSDPParamGroup::storage_destroyed(int64_t index, const OnDemandStorage* storage) noexcept {
  params_[static_cast<size_t>(index)].storage_destroyed(storage);
}

void FSDPParamGroup::issue_unshard() {
  if (!unsharded_.state().is_sharded()) return;
  unsharded_.check_has_values();
  // Tests that empty units after every operator have no prefetches.
  if (evict_after_every_operator() && !pinned()) return;
  const RuntimeMode runtime_mode;
  if (info_.has_pieces()) put_inner_shards_together();
  std::optional<ProfilerRange> prefetch;
  if (!pinned()) prefetch.emplace("prefetch", info_.name());
  unsharded_.issue(agreement_.words());
  info_.accounts().count(&Counters::all_gathers);
  if (!pinned()) info_.accounts().count(&Counters::prefetched_all_gathers);
}

void FSDPParamGroup::put_inner_shards_together() {
  unsharded_.issue_inner_shards(agreement_.words_for_pieces());
  auto& inner_shards = *unsharded_.inner_shards();
  if (agreement_.hear_pieces(inner_shards.wait())) inner_shards.agreed();
}

void FSDPParamGroup::wait_unshard() {
  if (!unsharded_.state().is_gathering()) return;
  const ProfilerRange range("all_gather_copy_out", info_.name());
  const auto gathered = unsharded_.wait();
  try {
    agreement_.check(gathered);
    unsharded_.agreed(is_of_all_ranks(gathered.from) ? Layouts::kAgreed : Layouts::kNotCompared);
  } catch (...) {
    unsharded_.empty();
    throw;
  }
}

void FSDPParamGroup::reshard() {
  if (unsharded_.state().is_sharded()) unsharded_.drop_part();
  empty(Leaves::kShards);
}

void FSDPParamGroup::reshard_after_forward() { empty(unsharded_.keep_part()); }

void FSDPParamGroup::evict_and_poison() { empty(Leaves::kPoison); }

void FSDPParamGroup::empty(Leaves leaves) {
  if (!unsharded_.may_be_emptied()) return;
  const ProfilerRange range("reshard", info_.name());
  writes_.note_raw_writes();
  writes_.write_back();
  unsharded_.empty(leaves);
  info_.accounts().count(&Counters::reshards);
}

void FSDPParamGroup::graph_recorded() {
  shard_writes_->graph_recorded();
  agreement_.used_in_training();
  gradients_.unsharded().remove_tripwires();
}

void await_failed_backward(const Unit& unit) {
  const auto root = unit.root();
  for (const auto& [id, group] : root->groups()) group->await_failed_backward();
}

void unshard_async(FSDPParamGroup& group) {
  group.await_failed_backward();
  if (is_never_sharded(group)) return;
  const ExclusiveUse use(group.info().comm_context().user());
  group.unsharded().empty_if_stale();
  group.issue_unshard();
  if (!group.unsharded().state().is_sharded()) asked_for_explicitly(group);
}

void unshard(FSDPParamGroup& group) {
  group.await_failed_backward();
  if (is_never_sharded(group)) return;
  const ExclusiveUse use(group.info().comm_context().user());
  const RuntimeMode runtime_mode;
  {
    const Pinned pinned(group);
    group.unsharded().empty_if_stale();
    group.issue_unshard();
    group.wait_unshard();
  }
  asked_for_explicitly(group);
}

void hold(FSDPParamGroup& group) {
  unshard(group);
  group.unsharded().hold();
}

void release(FSDPParamGroup& group) {
  group.await_failed_backward();
  group.unsharded().release();
  if (!group.unsharded().state().is_held()) group.reshard();
}

void release_own_parts(FSDPParamGroup& group) {
  group.await_failed_backward();
  group.unsharded().release();
  if (!group.unsharded().may_be_emptied()) return;
  group.writes().write_back_own_parts();
  group.reshard();
}

}  // namespace fsdp::internal
