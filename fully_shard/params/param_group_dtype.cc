// How a parameter of a group changes its dtype in place (Module::to(dtype) on a sharded
// module), and how members change theirs (full precision in evaluation).
#include "dtensor/dtensor.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/params/param_group.h"
#include "fully_shard/params/runtime_mode.h"
#include "fully_shard/transport/packed_copy.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace fsdp::internal {

void ParamGroup::check_member_may_change(int64_t index, int64_t own_graphs,
                                         const char* what) const {
  const auto& param = params_[static_cast<size_t>(index)];
  const char* in_the_way = nullptr;
  if (residency().is_held() || unit_->is_summoned())
    in_the_way = "its unit is held unsharded (SummonFullParams, Unsharded)";
  if (pinned() || !gradients_.empty()) in_the_way = "an operator or a backward is using its unit";
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(param.member());
  const int64_t graphs = accumulator ? static_cast<int64_t>(accumulator.use_count()) - 1 : 0;
  if (graphs > own_graphs) in_the_way = "a graph that uses it is alive";
  TORCH_CHECK_VALUE(in_the_way == nullptr, "sharded parameter '", param.name(), "': ", what,
                    " while ", in_the_way, " (rank ", dim_->global_rank(), ")");
}

void ParamGroup::check_members_may_change() const {
  for (size_t i = 0; i < params_.size(); ++i) {
    check_member_may_change(static_cast<int64_t>(i), /*own_graphs=*/0,
                            "its precision can not change (set_full_precision)");
  }
}

void ParamGroup::set_param_dtype(std::optional<at::ScalarType> dtype) {
  check_members_may_change();
  const RuntimeMode runtime_mode;
  drop_gather();
  reshard();
  for (auto& param : params_) param.set_param_dtype(dtype);
  open_staged_row();
  if (post_forward_) set_neighbours(post_forward_->neighbours());
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].storage() != nullptr) make_member(static_cast<int64_t>(i));
  }
}

void ParamGroup::change_dtype(int64_t index, const at::Tensor& from) {
  // `from` may be member.to(dtype).
  check_member_may_change(index, /*own_graphs=*/from.grad_fn() ? 1 : 0,
                          "its data can not be replaced (set_data, Module::to(dtype))");
  const RuntimeMode runtime_mode;
  drop_gather();
  reshard();
  param(index).set_dtype(from.scalar_type());
  agreed_.note_overwrite(static_cast<size_t>(index));
  note_copy(index, from);
  rebuild_shards(index, from);
  if (post_forward_) set_neighbours(post_forward_->neighbours());
  for (auto& param : params_) param.note_shard_written();
  shard_is_written(index);
  writes_.shard_written();
}

void ParamGroup::rebuild_shards(int64_t changed, const at::Tensor& from) {
  const auto members = device();
  const auto old = std::exchange(shards_, {});
  open_shards(members);
  for (size_t i = 0; i < params_.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    if (index == changed) continue;
    copy_bytes(shards_->data(index), old->data(index), old->length(index), old->device());
    const auto entry = params_[i].entry();
    if (entry.defined()) replace_local(entry, shards_->local_view(index, params_[i]));
    if (residency().is_borrowed() && params_[i].storage() != nullptr) {
      params_[i].storage()->fill(shards_->data(index));
    }
  }
  auto& param = params_[static_cast<size_t>(changed)];
  const auto local = shards_->local_view(changed, param);
  local.copy_(is_dtensor(from) ? local_of(from) : local_part(from.detach(), param.spec()));
  make_member(changed);
  auto owner = c10::intrusive_ptr<DTensorOwner>::reclaim_copy(owner_of(param.entry()));
  const auto becomes = make_dtensor(local, param.spec(), std::move(owner));
  from.unsafeGetTensorImpl()->shallow_copy_from(becomes.getIntrusivePtr());
}

}  // namespace fsdp::internal
