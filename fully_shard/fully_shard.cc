#include "fully_shard/fully_shard.h"

#include "fully_shard/params/param_group.h"
#include "fully_shard/params/registry_entry.h"
#include "fully_shard/units/managed_modules.h"
#include "fully_shard/units/unit.h"
#include "fully_shard/units/unit_table.h"
#include "fully_shard/units/validation.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <utility>

namespace fsdp {
namespace {

using internal::FoundParam;
using internal::ManagedModules;
using internal::Unit;

// A parameter that another unit sharded already, met under another name: a tie across
// units.
bool is_tied_member(const FoundParam& param) {
  return internal::OnDemandStorage::of(param.tensor.unsafeGetTensorImpl()) != nullptr;
}

at::Tensor entry_of_member(const at::Tensor& member) {
  const auto* storage = internal::OnDemandStorage::of(member.unsafeGetTensorImpl());
  const auto& group = static_cast<const internal::ParamGroup&>(storage->group());
  return group.params()[static_cast<size_t>(storage->index())].lock_entry();
}

void prefix_names(Unit& unit, const std::string& path) {
  unit.name = unit.name.empty() ? path : path + "." + unit.name;
  if (unit.group != nullptr) unit.group->rename(path + ".");
  for (const auto& weak : unit.children) {
    if (const auto child = weak.lock()) prefix_names(*child, path);
  }
}

void adopt_units(const std::shared_ptr<Unit>& unit, const ManagedModules& managed) {
  for (const auto& [child, path] : managed.units) {
    if (!child->is_root()) continue;  // reached twice, or already below another list's unit
    child->parent = unit;
    unit->children.push_back(child);
    if (!path.empty()) prefix_names(*child, path);
  }
}

// The handles of the member that are not the model's, once the registry has the entry:
// the found parameter, the vector it was sharded from, and the entry.
constexpr size_t kHandlesOfOurs = 3;

void register_entry(const FoundParam& param, const at::Tensor& entry) {
  for (const auto& slot : param.slots) internal::replace_parameter(slot, entry);
  if (param.tensor.use_count() > kHandlesOfOurs) {
    internal::RegistryEntry::of(entry)->watch_member(internal::MemberWatch(param));
  }
}

void shard_parameters(const DeviceMesh& mesh, const ManagedModules& managed,
                      const std::shared_ptr<Unit>& unit) {
  std::vector<at::Tensor> tensors;
  std::vector<std::string> names;
  std::vector<const FoundParam*> fresh;
  for (const auto& param : managed.params) {
    if (is_tied_member(param)) {
      for (const auto& slot : param.slots)
        internal::replace_parameter(slot, entry_of_member(param.tensor));
      continue;
    }
    tensors.push_back(param.tensor);
    names.push_back(param.slots.front().path);
    fresh.push_back(&param);
  }
  if (tensors.empty()) return;
  const auto group = internal::ParamGroup::create(mesh, tensors, std::move(names), unit);
  const auto entries = group->release_entries();
  for (size_t i = 0; i < fresh.size(); ++i) register_entry(*fresh[i], entries[i]);
}

void collect_units(torch::nn::Module& module, bool root_only,
                   std::vector<std::shared_ptr<Unit>>& units) {
  if (auto unit = internal::find_unit(module)) {
    const bool wanted = !root_only || unit->is_root();
    if (wanted && std::find(units.begin(), units.end(), unit) == units.end())
      units.push_back(std::move(unit));
  }
  for (const auto& child : module.children()) collect_units(*child, root_only, units);
}

}  // namespace

FSDPModule fully_shard(const std::vector<torch::nn::Module*>& modules, const DeviceMesh& mesh,
                       FullyShardOptions options) {
  internal::validate_request(modules, mesh, options);
  const auto managed = internal::find_managed(modules, options.ignored_params);
  internal::validate_parameters(modules, managed, mesh, options);
  auto unit = std::make_shared<Unit>(std::move(options));
  adopt_units(unit, managed);
  shard_parameters(mesh, managed, unit);
  for (auto* module : modules) internal::attach_unit(*module, unit);
  return FSDPModule(std::move(unit));
}

FSDPModule fully_shard(torch::nn::Module& module, const DeviceMesh& mesh,
                       FullyShardOptions options) {
  return fully_shard(std::vector<torch::nn::Module*>{&module}, mesh, std::move(options));
}

bool is_fsdp_module(const torch::nn::Module& module) {
  return internal::find_unit(module) != nullptr;
}

FSDPModule get_fsdp_module(torch::nn::Module& module) {
  auto unit = internal::find_unit(module);
  TORCH_CHECK_VALUE(unit != nullptr,
                    "get_fsdp_module: fully_shard was not applied to this module (",
                    internal::module_type_name(module), ")");
  return FSDPModule(std::move(unit));
}

std::vector<FSDPModule> fsdp_modules(torch::nn::Module& module, bool root_only) {
  std::vector<std::shared_ptr<Unit>> units;
  collect_units(module, root_only, units);
  return {units.begin(), units.end()};
}

}  // namespace fsdp
