#include "fully_shard/params/group_builder.h"

#include "dtensor/dtensor.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/params/all_gather.h"
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

#include <algorithm>
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
  for (const auto& [name, tensor, cut, codec] : params) {
    auto& param = sharded.emplace_back(name, tensor, cut, over, precision.param_dtype);
    param.meta().set_codec(codec);
    if (precision.param_dtype && precision.cast_forward_inputs) param.cast_inputs();
  }
  return sharded;
}

// This rank's part of the whole value goes to `shards`.
void take_start_value(FSDPParamGroup& group, const ShardBuffer& shards, int64_t index,
                      const at::Tensor& whole) {
  const auto& param = group.params()[static_cast<size_t>(index)];
  if (!group.info().is_alone())
    group.agreement().values().note_start(static_cast<size_t>(index), param, whole);
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

void check_members_may_change(const FSDPParamGroup& group, const char* what) {
  for (size_t i = 0; i < group.params().size(); ++i)
    check_member_may_change(group, static_cast<int64_t>(i), /*own_graphs=*/0, what);
}

// Nothing is left, or under way, of what was gathered.
void drop_unsharded(FSDPParamGroup& group) {
  group.unsharded().drop_gather();
  group.unsharded().shards_change();
  group.reshard();
}

// The parameters are `params` now, of which the `changed` ones have other shards: the
// shards in new memory, those without values, the others as they were.
void remake_shards(FSDPParamGroup& group, std::vector<FSDPParam> params,
                   const std::vector<int64_t>& changed) {
  const auto& old = group.shards();
  auto made = old.remade(params, group.info().comm_context(), old.member_device());
  group.params() = std::move(params);
  for (size_t i = 0; i < group.params().size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    if (std::find(changed.begin(), changed.end(), index) != changed.end()) continue;
    const auto& param = group.params()[i];
    copy_bytes(made.data(index), old.data(index), old.length(index), old.device());
    const auto entry = param.entry();
    if (entry.defined()) replace_local(entry, made.local_view(index, param));
    if (group.unsharded().state().is_never_sharded() && param.storage() != nullptr)
      param.storage()->fill(made.data(index));
  }
  group.shards() = std::move(made);
  group.agreement().shards_replaced();
  group.unsharded().layouts_changed();
}

void check_may_be_stored(FSDPParamGroup& group, int64_t index) {
  auto& param = group.params()[static_cast<size_t>(index)];
  const char* why = nullptr;
  if (param.is_trainable()) why = "is trained: freeze it with requires_grad_(false)";
  if (param.entry().defined() && param.entry().grad().defined()) why = "has a gradient";
  if (group.gradients().keeps_gradients())
    why = "lies in a unit whose gradients wait for a reduction (set_requires_gradient_sync)";
  if (param.meta().codec() == nullptr) why = "is in full precision (set_full_precision)";
  if (param.meta().cut().dim != 0) why = "is not cut along dimension 0";
  if (param.meta().member_spec()) why = "is tensor-parallel";
  TORCH_CHECK_VALUE(why == nullptr, "store_codes: parameter '", param.name(), "' ",
                    why == nullptr ? "" : why, " (rank ", group.info().rank(), ")");
}

// The registry entry is what the shard is now.
void show_in_entry(FSDPParamGroup& group, int64_t index) {
  const auto& param = group.params()[static_cast<size_t>(index)];
  const auto entry = param.entry();
  if (!entry.defined()) return;
  auto owner = c10::intrusive_ptr<DTensorOwner>::reclaim_copy(owner_of(entry));
  const auto becomes =
      make_dtensor(group.shards().local_view(index, param), param.spec(), std::move(owner));
  entry.unsafeGetTensorImpl()->shallow_copy_from(becomes.getIntrusivePtr());
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
    show_in_entry(group, index);
    if (params[i].storage() != nullptr) make_member(group, index);
    params[i].set_without_values({});
  }
}

void change_dtype(FSDPParamGroup& group, int64_t index, const at::Tensor& from) {
  TORCH_CHECK_VALUE(!group.params()[static_cast<size_t>(index)].meta().is_stored_as_codes(),
                    "sharded parameter '", group.parameter_name(index),
                    "': its data can not be replaced, since it is stored as codes (store_codes(); "
                    "rank ",
                    group.info().rank(), ")");
  // `from` may be member.to(dtype).
  check_member_may_change(group, index, /*own_graphs=*/from.grad_fn() ? 1 : 0,
                          "its data can not be replaced (set_data, Module::to(dtype))");
  const RuntimeMode runtime_mode;
  drop_unsharded(group);
  auto params = group.params();
  params[static_cast<size_t>(index)].set_dtype(from.scalar_type());
  remake_shards(group, std::move(params), {index});
  const auto& param = group.params()[static_cast<size_t>(index)];
  const auto local = group.shards().local_view(index, param);
  local.copy_(is_dtensor(from) ? local_of(from) : local_part(from.detach(), param.spec()));
  make_member(group, index);
  auto owner = c10::intrusive_ptr<DTensorOwner>::reclaim_copy(owner_of(param.entry()));
  const auto becomes = make_dtensor(local, param.spec(), std::move(owner));
  group.writes().remade(index, from);
  from.unsafeGetTensorImpl()->shallow_copy_from(becomes.getIntrusivePtr());
}

void check_precision_may_change(const FSDPParamGroup& group) {
  check_members_may_change(group, "its precision can not change (set_full_precision)");
}

bool has_less_precision(const FSDPParamGroup& group) {
  return group.info().unit().precision.param_dtype || any(group.params(), &ParamMeta::has_codec);
}

void set_full_precision(FSDPParamGroup& group, bool full_precision) {
  check_precision_may_change(group);
  const RuntimeMode runtime_mode;
  drop_unsharded(group);
  const auto param_dtype = group.info().unit().precision.param_dtype;
  for (auto& param : group.params()) {
    param.set_param_dtype(full_precision ? std::nullopt : param_dtype);
    param.meta().leave_codec_out(full_precision);
  }
  group.unsharded().layouts_changed();
  for (size_t i = 0; i < group.params().size(); ++i) {
    if (group.params()[i].storage() != nullptr) make_member(group, static_cast<int64_t>(i));
  }
}

std::vector<int64_t> parameters_to_store(FSDPParamGroup& group) {
  std::vector<int64_t> to_store;
  for (size_t i = 0; i < group.params().size(); ++i) {
    const auto& meta = group.params()[i].meta();
    if (!meta.has_codec() || meta.is_stored_as_codes()) continue;
    to_store.push_back(static_cast<int64_t>(i));
    check_may_be_stored(group, to_store.back());
  }
  if (to_store.empty()) return to_store;
  check_members_may_change(group, "it can not become codes (store_codes)");
  group.unsharded().check_has_values();
  return to_store;
}

void store_codes(FSDPParamGroup& group, const std::vector<int64_t>& to_store) {
  if (to_store.empty()) return;
  const RuntimeMode runtime_mode;
  drop_unsharded(group);
  auto params = group.params();
  std::vector<at::Tensor> codes;
  for (const auto index : to_store) {
    auto& param = params[static_cast<size_t>(index)];
    codes.push_back(encoded(param, group.shards().elements(index, param)));
    param.store_codes();
  }
  remake_shards(group, std::move(params), to_store);
  for (size_t i = 0; i < to_store.size(); ++i) {
    const auto index = to_store[i];
    const auto& param = group.params()[static_cast<size_t>(index)];
    group.shards().elements(index, param).copy_(codes[i]);
    show_in_entry(group, index);
  }
  group.writes().shards_filled();
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
