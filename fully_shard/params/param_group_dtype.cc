// How a parameter of a group changes its dtype in place: Module::to(dtype) on a sharded
// module.
#include "dtensor/dtensor.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/redistribute.h"
#include "fully_shard/params/param_group.h"
#include "fully_shard/params/runtime_mode.h"
#include "fully_shard/transport/packed_copy.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace fsdp::internal {

void ParamGroup::check_dtype_may_change(int64_t index, const at::Tensor& from) const {
  const auto& param = params_[static_cast<size_t>(index)];
  const char* in_the_way = nullptr;
  if (residency().is_held())
    in_the_way = "its unit is held unsharded (SummonFullParams, Unsharded)";
  if (pinned() || !gradients_.empty()) in_the_way = "an operator or a backward is using its unit";
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(param.member());
  const int64_t graphs = accumulator ? static_cast<int64_t>(accumulator.use_count()) - 1 : 0;
  const int64_t expected_graphs = from.grad_fn() ? 1 : 0;  // `from` may be member.to(dtype)
  if (graphs > expected_graphs) in_the_way = "a graph that uses it is alive";
  TORCH_CHECK_VALUE(in_the_way == nullptr, "the data of sharded parameter '", param.name(),
                    "' can not be replaced (set_data, Module::to(dtype)) while ", in_the_way,
                    " (rank ", dim_->global_rank(), ")");
}

void ParamGroup::change_dtype(int64_t index, const at::Tensor& from) {
  check_dtype_may_change(index, from);
  const RuntimeMode runtime_mode;
  drop_gather();
  reshard();
  param(index).set_dtype(from.scalar_type());
  rebuild_shards(index, from);
  if (post_forward_) set_neighbours(post_forward_->neighbours());
  for (auto& param : params_) param.note_shard_written();
  agreed_.note_write(static_cast<size_t>(index));
  writes_.shard_written();
}

void ParamGroup::rebuild_shards(int64_t changed, const at::Tensor& from) {
  const auto old = std::exchange(shards_, {});
  open_shards(old->device());
  for (size_t i = 0; i < params_.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    if (index == changed) continue;
    copy_bytes(shards_->data(index), old->data(index), old->length(index), device());
    const auto entry = params_[i].entry();
    if (entry.defined()) replace_local(entry, shards_->local_view(index, params_[i]));
    if (residency().is_borrowed() && params_[i].storage() != nullptr) {
      params_[i].storage()->fill(shards_->data(index));
    }
  }
  auto& param = params_[static_cast<size_t>(changed)];
  const auto local = shards_->local_view(changed, param);
  local.copy_(is_dtensor(from) ? local_of(from) : local_part(from.detach(), *param.spec()));
  param.make_member(c10::intrusive_ptr<OnDemandGroup>::reclaim_copy(this), changed,
                    dim_->shard_count() * member_layout().chunk(changed).capacity_bytes);
  if (residency().is_borrowed()) param.storage()->fill(shards_->data(changed));
  auto owner = c10::intrusive_ptr<DTensorOwner>::reclaim_copy(owner_of(param.entry()));
  const auto becomes = make_dtensor(local, param.spec(), std::move(owner));
  from.unsafeGetTensorImpl()->shallow_copy_from(becomes.getIntrusivePtr());
}

}  // namespace fsdp::internal
