#include "fully_shard/params/change_dtype.h"

#include "dtensor/dtensor.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/params/group_builder.h"
#include "fully_shard/params/runtime_mode.h"
#include "fully_shard/transport/packed_copy.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace fsdp::internal {
namespace {

void check_member_may_change(const FSDPParamGroup& group, int64_t index, int64_t own_graphs,
                             const char* what) {
  const auto& param = group.params()[static_cast<size_t>(index)];
  const char* in_the_way = nullptr;
  if (group.unsharded().sharded_state().is_held() || group.info().unit().is_summoned())
    in_the_way = "its unit is held unsharded (SummonFullParams, Unsharded)";
  if (group.pinned() || !group.gradients().empty())
    in_the_way = "an operator or a backward is using its unit";
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(param.member());
  const int64_t graphs = accumulator ? static_cast<int64_t>(accumulator.use_count()) - 1 : 0;
  if (graphs > own_graphs) in_the_way = "a graph that uses it is alive";
  TORCH_CHECK_VALUE(in_the_way == nullptr, "sharded parameter '", param.name(), "': ", what,
                    " while ", in_the_way, " (rank ", group.info().rank(), ")");
}

// The others' shards as they were, in memory that has room for the changed one.
void copy_others(FSDPParamGroup& group, int64_t changed, const ShardBuffer& made) {
  const auto& old = group.shards();
  for (size_t i = 0; i < group.params().size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    if (index == changed) continue;
    const auto& param = group.params()[i];
    copy_bytes(made.data(index), old.data(index), old.length(index), old.device());
    const auto entry = param.entry();
    if (entry.defined()) replace_local(entry, made.local_view(index, param));
    if (group.unsharded().sharded_state().is_never_sharded() && param.storage() != nullptr)
      param.storage()->fill(made.data(index));
  }
}

}  // namespace

void change_dtype(FSDPParamGroup& group, int64_t index, const at::Tensor& from) {
  // `from` may be member.to(dtype).
  check_member_may_change(group, index, /*own_graphs=*/from.grad_fn() ? 1 : 0,
                          "its data can not be replaced (set_data, Module::to(dtype))");
  const RuntimeMode runtime_mode;
  group.unsharded().drop_gather();
  group.unsharded().source().shards_change();
  group.reshard();
  auto& param = group.params()[static_cast<size_t>(index)];
  param.set_dtype(from.scalar_type());
  auto made = group.shards().remade(group.params(), group.info().comm_context(),
                                    group.shards().member_device());
  copy_others(group, index, made);
  group.shards() = std::move(made);
  group.agreement().shards_replaced();
  group.unsharded().layouts_changed();
  const auto local = group.shards().local_view(index, param);
  local.copy_(is_dtensor(from) ? local_of(from) : local_part(from.detach(), param.spec()));
  make_member(group, index);
  auto owner = c10::intrusive_ptr<DTensorOwner>::reclaim_copy(owner_of(param.entry()));
  const auto becomes = make_dtensor(local, param.spec(), std::move(owner));
  group.writes().remade(index, from);
  from.unsafeGetTensorImpl()->shallow_copy_from(becomes.getIntrusivePtr());
}

void check_members_may_change(const FSDPParamGroup& group) {
  for (size_t i = 0; i < group.params().size(); ++i) {
    check_member_may_change(group, static_cast<int64_t>(i), /*own_graphs=*/0,
                            "its precision can not change (set_full_precision)");
  }
}

void set_param_dtype(FSDPParamGroup& group, std::optional<at::ScalarType> dtype) {
  check_members_may_change(group);
  const RuntimeMode runtime_mode;
  group.unsharded().drop_gather();
  group.unsharded().source().shards_change();
  group.reshard();
  for (auto& param : group.params()) param.set_param_dtype(dtype);
  group.unsharded().layouts_changed();
  for (size_t i = 0; i < group.params().size(); ++i) {
    if (group.params()[i].storage() != nullptr) make_member(group, static_cast<int64_t>(i));
  }
}

}  // namespace fsdp::internal
