#include "fully_shard/params/fsdp_param_group.h"

#include "device_mesh/internal/profiler_range.h"
#include "fully_shard/params/gradient_share.h"
#include "fully_shard/params/runtime_mode.h"
#include "fully_shard/units/root.h"
#include "on_demand/pass.h"

#include <optional>
#include <utility>

namespace fsdp::internal {

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
      unsharded_(info_, params_, shards_, *this),
      agreement_(info_, params_, shards_),
      writes_(info_, params_, shards_, unsharded_, agreement_, *this),
      gradients_(info_, params_, shards_, unsharded_.weak_writes()) {
  info_.unit().attach(*this);
}

FSDPParamGroup::~FSDPParamGroup() {
  info_.unit().detach_group();
  info_.driver().destroyed(*this);
}

void FSDPParamGroup::touch() {
  const bool is_on_device = !shards_.member_device().is_cpu();
  if (is_on_device && settled_but_for_stream(current_pass())) return unsharded_.use();
  unsharded_.check_has_values();
  if (!unsharded_.sharded_state().is_never_sharded()) {
    info_.driver().touched(*this);
    return unsharded_.use();
  }
  // As graph_recorded(): a backward would add to them, and tensor-parallel ranks send for
  // it.
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

at::Tensor FSDPParamGroup::gradient_share(int64_t, const at::Tensor& gradient) const {
  return internal::gradient_share(gradient, info_.mesh());
}

void FSDPParamGroup::storage_destroyed(int64_t index, const OnDemandStorage* storage) noexcept {
  params_[static_cast<size_t>(index)].storage_destroyed(storage);
}

void FSDPParamGroup::issue_unshard() {
  if (!unsharded_.sharded_state().is_sharded()) return;
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
  auto& source = unsharded_.source();
  if (agreement_.hear_pieces(source.wait_for_inner_shards())) source.inner_shards_agreed();
}

void FSDPParamGroup::wait_unshard() {
  if (!unsharded_.sharded_state().is_gathering()) return;
  const ProfilerRange range("all_gather_copy_out", info_.name());
  const auto gathered = unsharded_.wait();
  try {
    agreement_.check(gathered);
    if (gathered.from == CameFrom::kAllShards) unsharded_.source().layouts_agreed();
  } catch (...) {
    unsharded_.empty();
    throw;
  }
}

void FSDPParamGroup::reshard() {
  if (unsharded_.sharded_state().is_sharded()) unsharded_.drop_post_forward_shards();
  empty();
}

void FSDPParamGroup::reshard_after_forward() {
  unsharded_.keep_post_forward_shards();
  empty();
}

void FSDPParamGroup::empty() {
  if (!unsharded_.may_be_emptied()) return;
  const ProfilerRange range("reshard", info_.name());
  writes_.note_raw_writes();
  writes_.write_back();
  unsharded_.empty();
  info_.accounts().count(&Counters::reshards);
}

void FSDPParamGroup::evict_and_poison() {
  if (!unsharded_.may_be_emptied()) return;
  const ProfilerRange range("reshard", info_.name());
  writes_.note_raw_writes();
  writes_.write_back();
  unsharded_.poison();
  unsharded_.empty();
  info_.accounts().count(&Counters::reshards);
}

void FSDPParamGroup::graph_recorded() {
  unsharded_.writes().graph_recorded();
  agreement_.used_in_training();
  gradients_.unsharded().remove_tripwires();
}

}  // namespace fsdp::internal
