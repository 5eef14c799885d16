#include "fully_shard/params/group_builder.h"

#include "dtensor/dtensor.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/params/fsdp_param_group.h"
#include "fully_shard/params/registry_entry.h"
#include "fully_shard/params/runtime_mode.h"
#include "fully_shard/transport/packed_copy.h"
#include "fully_shard/units/module_tree.h"
#include "fully_shard/units/unit.h"
#include "fully_shard/units/validation.h"
#include "on_demand/deferred_part.h"
#include "on_demand/gate_key.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <charconv>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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

void check_member_may_change(const FSDPParamGroup& group, int64_t index, int64_t own_graphs,
                             const char* what) {
  group.await_failed_backward();
  const auto& param = group.params()[static_cast<size_t>(index)];
  const char* in_the_way = nullptr;
  if (group.unsharded().state().is_held() || group.info().unit().is_summoned())
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
    if (group.unsharded().state().is_never_sharded() && param.storage() != nullptr)
      param.storage()->fill(made.data(index));
  }
}

bool may_be_late(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad() && !is_dtensor(tensor) &&
         !find_managed_tensor(tensor).group;
}

void check_module(const ModuleTree& tree, size_t place, int64_t rank) {
  for_each_registered(tree.module(place), [&](const std::string& key, const at::Tensor& tensor) {
    if (!may_be_late(tensor)) return;
    const auto unit = tree.nearest_unit(place);
    TORCH_CHECK_VALUE(
        unit->ignores(tensor), "parameter '", tree.path_of(place, key), "' of shape ",
        tensor.sizes(), " was registered in unit '", unit->display_name(),
        "' after fully_shard, so no unit reduces its gradient and the ranks' copies would differ. "
        "Apply fully_shard to the sub-module that has it, or freeze it with "
        "set_requires_grad(false), or say with FSDPModule::ignore({parameter}) that you keep the "
        "copies equal (rank ",
        rank, ")");
  });
}

using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;

// The outermost modules at and below `unit` that are alive.
void add_outermost(const Unit& unit, Modules& modules) {
  const auto before = modules.size();
  for (const auto& weak : unit.modules()) {
    if (auto module = weak.lock()) modules.push_back(std::move(module));
  }
  if (modules.size() != before) return;
  for (const auto& child : unit.children()) add_outermost(*child, modules);
}

const Unit& root_of(const Unit& unit) {
  const auto* root = &unit;
  while (const auto enclosing = root->parent()) root = enclosing.get();
  return *root;
}

std::string join(const std::string& path, std::string_view rest) {
  if (path.empty() || rest.empty()) return path + std::string(rest);
  return path + "." + std::string(rest);
}

// The path that stands for "[i]": where the i-th module was met, or the first one.
const std::string& path_of_module(const FoundUnit& found, size_t index) {
  const auto& modules = found.unit->modules();
  const auto module = index < modules.size() ? modules[index].lock() : nullptr;
  const auto met = found.paths.find(module.get());
  return met == found.paths.end() ? found.path : met->second;
}

std::string renamed(const FoundUnit& found, std::string_view name) {
  if (name.empty() || name.front() != '[') return join(found.path, name);
  size_t index = 0;
  const auto* const end = name.data() + name.size();
  const auto* rest = std::from_chars(name.data() + 1, end, index).ptr + 1;  // after "]"
  if (rest < end) ++rest;                                                   // after "."
  return join(path_of_module(found, index), {rest, static_cast<size_t>(end - rest)});
}

}  // namespace

void make_member(FSDPParamGroup& group, int64_t index) {
  auto& param = group.params()[static_cast<size_t>(index)];
  const auto& shards = group.shards();
  param.make_member(c10::intrusive_ptr<OnDemandGroup>::reclaim_copy(&group), index,
                    group.unsharded().layout().whole_bytes(index), shards.member_device());
  if (group.unsharded().state().is_never_sharded() && shards.has_values())
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

void change_dtype(FSDPParamGroup& group, int64_t index, const at::Tensor& from) {
  // `from` may be member.to(dtype).
  check_member_may_change(group, index, /*own_graphs=*/from.grad_fn() ? 1 : 0,
                          "its data can not be replaced (set_data, Module::to(dtype))");
  const RuntimeMode runtime_mode;
  group.unsharded().drop_gather();
  group.unsharded().shards_change();
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
  group.unsharded().shards_change();
  group.reshard();
  for (auto& param : group.params()) param.set_param_dtype(dtype);
  group.unsharded().layouts_changed();
  for (size_t i = 0; i < group.params().size(); ++i) {
    if (group.params()[i].storage() != nullptr) make_member(group, static_cast<int64_t>(i));
  }
}

void check_no_late_parameters(const FSDPParamGroup& group) {
  Modules alive;
  add_outermost(root_of(group.info().unit()), alive);
  std::vector<torch::nn::Module*> starts;
  for (const auto& module : alive) starts.push_back(module.get());
  const ModuleTree tree(starts);
  for (size_t i = 0; i < tree.size(); ++i) check_module(tree, i, group.info().rank());
}

void name_from_above(const FoundUnit& found) {
  for_each_unit_below(*found.unit, [&found](Unit& unit) {
    unit.name = renamed(found, unit.name);
    if (unit.group() == nullptr) return;
    for (auto& param : unit.group()->params()) {
      param.rename(renamed(found, param.name()));
      if (param.storage() != nullptr) param.storage()->renamed();
    }
  });
}

}  // namespace fsdp::internal
