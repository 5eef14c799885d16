#include "fully_shard/params/group_builder.h"

#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/params/registry_entry.h"
#include "fully_shard/params/runtime_mode.h"
#include "fully_shard/units/unit_device.h"
#include "on_demand/deferred_part.h"
#include "on_demand/gate_key.h"

#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

using GroupPtr = c10::intrusive_ptr<FSDPParamGroup>;

std::optional<DeviceMesh> mesh_of_members(const std::vector<NewParam>& params) {
  for (const auto& param : params) {
    if (const auto* const meta = find_meta(param.tensor)) return meta->spec.mesh();
  }
  return std::nullopt;
}

std::vector<FSDPParam> sharded(const std::vector<NewParam>& params, const GroupInfo& info,
                               const MixedPrecisionPolicy& precision) {
  std::vector<FSDPParam> sharded;
  sharded.reserve(params.size());
  const UnitMesh over{info.mesh(), mesh_of_members(params), info.unit().outer};
  for (const auto& [name, tensor, cut] : params) {
    auto& param = sharded.emplace_back(name, tensor, cut, over, precision.param_dtype);
    if (precision.param_dtype && precision.cast_forward_inputs) param.cast_inputs();
  }
  return sharded;
}

// This rank's part of the whole value goes to `shards`.
void take_start_value(FSDPParamGroup& group, const ShardBuffer& shards, int64_t index,
                      const at::Tensor& whole) {
  const auto& param = group.params()[static_cast<size_t>(index)];
  if (!group.info().is_alone())
    group.agreement().values().note_start(static_cast<size_t>(index), param.name(), whole,
                                          param.meta().cut());
  shards.take_part(index, whole.to(shards.device()).const_data_ptr());
}

// The entry of one parameter; its tensor is a member then.
at::Tensor adopt(const GroupPtr& group, int64_t index, const at::Tensor& tensor) {
  auto& param = group->params()[static_cast<size_t>(index)];
  const auto& shards = group->shards();
  if (shards.has_values()) {
    take_start_value(*group, shards, index, held_part(tensor));
  } else {
    param.set_without_values(held_part(tensor).detach());
  }
  if (is_deferred_part(tensor)) release_part(tensor);
  auto owner = c10::make_intrusive<RegistryEntry>(group, tensor, index);
  auto entry = make_dtensor(shards.local_view(index, param), param.spec(), std::move(owner));
  entry.set_requires_grad(tensor.requires_grad());
  param.set_entry(entry);
  make_member(*group, index);
  group->info().driver().watch_gradient(tensor, *group, index);
  return entry;
}

}  // namespace

void make_member(FSDPParamGroup& group, int64_t index) {
  auto& param = group.params()[static_cast<size_t>(index)];
  const auto& shards = group.shards();
  param.make_member(c10::intrusive_ptr<OnDemandGroup>::reclaim_copy(&group), index,
                    group.unsharded().layout().whole_bytes(index), shards.member_device());
  if (group.unsharded().sharded_state().is_never_sharded() && shards.has_values())
    param.storage()->fill(shards.data(index));
}

std::vector<at::Tensor> build_group(GroupInfo info, const std::vector<NewParam>& params,
                                    const MixedPrecisionPolicy& precision) {
  const RuntimeMode runtime_mode;
  install_gate();
  const auto device = device_in_unit(params.front().tensor, info.mesh());
  auto of_group = sharded(params, info, precision);
  const auto group =
      c10::make_intrusive<FSDPParamGroup>(std::move(info), std::move(of_group), device);
  group->gradients().settings().set_dtype(precision.reduce_dtype);
  std::vector<at::Tensor> entries;
  for (size_t i = 0; i < params.size(); ++i)
    entries.push_back(adopt(group, static_cast<int64_t>(i), params[i].tensor));
  group->writes().shards_filled();
  return entries;
}

void materialize(FSDPParamGroup& group, c10::Device device,
                 const std::function<at::Tensor(const at::Tensor&)>& value_of) {
  if (group.shards().has_values()) return;
  auto& params = group.params();
  auto made = group.shards().remade(params, group.info().comm_context(), device);
  for (size_t i = 0; i < params.size(); ++i) {
    const auto whole = value_of(params[i].without_values());
    if (whole.defined()) take_start_value(group, made, static_cast<int64_t>(i), whole);
  }
  group.shards() = std::move(made);
  group.unsharded().layouts_changed();
  group.writes().shards_filled();
  const RuntimeMode runtime_mode;
  for (size_t i = 0; i < params.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const auto entry = params[i].entry();
    if (entry.defined()) {
      auto owner = c10::intrusive_ptr<DTensorOwner>::reclaim_copy(owner_of(entry));
      const auto becomes = make_dtensor(group.shards().local_view(index, params[i]),
                                        params[i].spec(), std::move(owner));
      entry.unsafeGetTensorImpl()->shallow_copy_from(becomes.getIntrusivePtr());
    }
    if (params[i].storage() != nullptr) make_member(group, index);
    params[i].set_without_values({});
  }
}

}  // namespace fsdp::internal
