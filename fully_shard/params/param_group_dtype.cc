// How a parameter of a group changes its dtype in place: Module::to(dtype) on a sharded
// module.
#include "dtensor/dtensor.h"
#include "dtensor/internal/redistribute.h"
#include "fully_shard/params/param_group.h"
#include "fully_shard/params/registry_entry.h"
#include "fully_shard/transport/packed_copy.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace fsdp::internal {

void ParamGroup::check_dtype_may_change(int64_t index, const at::Tensor& from) const {
  const auto& param = params_[static_cast<size_t>(index)];
  const auto member = param.lock_member();
  const char* in_the_way = nullptr;
  if (held()) in_the_way = "its unit is held unsharded (SummonFullParams, Unsharded)";
  if (pinned() || !gradients_.empty()) in_the_way = "an operator or a backward is using its unit";
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(member);
  const int64_t graphs = accumulator ? static_cast<int64_t>(accumulator.use_count()) - 1 : 0;
  const int64_t expected_graphs = from.grad_fn() ? 1 : 0;  // `from` may be member.to(dtype)
  if (graphs > expected_graphs) in_the_way = "a graph that uses it is alive";
  TORCH_CHECK_VALUE(in_the_way == nullptr, "the dtype of sharded parameter '", param.name,
                    "' can not change while ", in_the_way, " (rank ", context_->rank(), ")");
}

void ParamGroup::change_dtype(int64_t index, const at::Tensor& from) {
  check_dtype_may_change(index, from);
  c10::InferenceMode no_inference(false);
  c10::NoGradGuard no_grad;
  discard_all_gather();
  reshard();
  const auto old_shards = shards_;
  const auto old_layout = std::move(layout_);
  auto& changed = params_[static_cast<size_t>(index)];
  changed.dtype = from.scalar_type();
  changed.tripwire.reset();
  open_shards(old_shards.device());
  for (size_t i = 0; i < params_.size(); ++i) {
    const auto& param = params_[i];
    const auto position = static_cast<int64_t>(i);
    if (position == index) continue;
    const auto& chunk = old_layout->chunk(position);
    copy_bytes(shard_data(position),
               static_cast<const char*>(old_shards.const_data_ptr()) + chunk.offset,
               chunk.length(context_->rank()), shards_.device());
    if (const auto entry = param.lock_entry(); entry.defined())
      replace_local(entry, local_view(position));
    if (context_->world() == 1 && param.storage != nullptr)
      param.storage->fill(shard_data(position));
  }
  const auto local = local_view(index);
  local.copy_(is_dtensor(from) ? local_of(from) : local_part(from.detach(), *changed.spec));
  make_member(changed.lock_member(), index);
  auto owner = c10::intrusive_ptr<DTensorOwner>::reclaim_copy(owner_of(changed.lock_entry()));
  const auto becomes = make_dtensor(local, changed.spec, std::move(owner));
  from.unsafeGetTensorImpl()->shallow_copy_from(becomes.getIntrusivePtr());
  for (auto& param : params_) param.shard_version.reset();
  ++writes_;
}

}  // namespace fsdp::internal
