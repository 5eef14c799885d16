#include "fully_shard/fully_shard.h"

#include "device_mesh/module_ref.h"
#include "fully_shard/params/fsdp_param.h"
#include "fully_shard/params/fsdp_param_group.h"
#include "fully_shard/params/group_builder.h"
#include "fully_shard/params/registry_entry.h"
#include "fully_shard/step/runtime.h"
#include "fully_shard/units/module_tree.h"
#include "fully_shard/units/shard_placement.h"
#include "fully_shard/units/shared_storage.h"
#include "fully_shard/units/unit.h"
#include "fully_shard/units/validation.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <unordered_set>
#include <utility>

namespace fsdp {
namespace {

using internal::FoundParam;
using internal::ManagedModules;
using internal::ModuleTree;
using internal::Unit;

at::Tensor entry_of_member(const at::Tensor& member) {
  const auto managed = internal::find_managed_tensor(member);
  return managed.group->params()[static_cast<size_t>(managed.index)].entry();
}

void adopt_units(const std::shared_ptr<Unit>& unit, const ManagedModules& managed) {
  for (const auto& found : managed.units) {
    if (!found.unit->is_root()) continue;  // below a unit that this walk did not come from
    internal::await_failed_backward(*found.unit);
    Unit::adopt(found.unit, unit);
    internal::name_from_above(found);
  }
}

void register_entry(const FoundParam& param, const at::Tensor& entry) {
  for (const auto& slot : param.slots) internal::put(slot, entry);
  if (param.is_held_by_member())
    internal::RegistryEntry::of(entry)->watch_member(internal::MemberWatch(param.slots));
}

void shard_parameters(const DeviceMesh& mesh, const ManagedModules& managed,
                      const std::shared_ptr<Unit>& unit, std::optional<int64_t> neighbours) {
  std::vector<internal::NewParam> params;
  std::vector<const FoundParam*> fresh;
  for (const auto& param : managed.params) {
    if (param.is_tied_to_a_unit()) {
      for (const auto& slot : param.slots) internal::put(slot, entry_of_member(param.tensor));
      continue;
    }
    params.push_back({param.path, param.tensor, param.cut, param.codec});
    fresh.push_back(&param);
  }
  if (params.empty()) return;
  const auto runtime = internal::Runtime::of(mesh);
  const auto replicas = runtime->replicas(mesh, unit->outer);
  const auto sharing = neighbours ? runtime->neighbours(mesh, *neighbours) : nullptr;
  const auto entries = internal::build_group(
      {mesh, runtime->comm_context(), replicas, unit, runtime}, params, unit->precision);
  unit->group()->unsharded().set_neighbours(sharing);
  for (size_t i = 0; i < fresh.size(); ++i) register_entry(*fresh[i], entries[i]);
}

// {replicas, one shard} over the ranks of `mesh`.
DeviceMesh of_replicas(const DeviceMesh& mesh) {
  TORCH_CHECK_VALUE(mesh.ndim() == 1, "replicate: the mesh is ", to_string(mesh),
                    "; it must have one dimension, over which parameters are replicated (rank ",
                    mesh.rank(), ")");
  return DeviceMesh::from_groups({mesh.group(0), mesh.neighbours(0, 1).group(0)},
                                 mesh.device_type(), mesh.ranks(), {mesh.size(), 1},
                                 {"replicate", "shard"});
}

// The registry of a TorchScript module.
class AdoptedModule : public torch::nn::Module {
 public:
  AdoptedModule(std::string name, const torch::jit::Module& script)
      : torch::nn::Module(std::move(name)) {
    for (const auto& [key, tensor] : script.named_parameters(/*recurse=*/false))
      register_parameter(key, tensor, tensor.requires_grad());
    for (const auto& [key, tensor] : script.named_buffers(/*recurse=*/false))
      register_buffer(key, tensor);
    for (const auto& [key, child] : script.named_children())
      register_module(key, std::make_shared<AdoptedModule>(key, child));
  }
};

}  // namespace

FSDPModule fully_shard(const std::vector<torch::nn::Module*>& modules, const DeviceMesh& mesh,
                       FullyShardOptions options) {
  internal::validate_request(modules, mesh, options);
  auto managed = internal::find_managed(modules, options.ignored_params);
  internal::validate_parameters(modules, managed, internal::StorageUsers(modules), mesh, options);
  const auto ranks = internal::ranks_that_shard(mesh);
  const internal::ErrorContext context{"fully_shard", c10::str(" (rank ", mesh.rank(), ")")};
  internal::place_parameters(managed, ranks, options, context);
  internal::choose_codecs(managed, options, context);
  const auto runtime = options.shard_placement_fn ? internal::Runtime::of(mesh) : nullptr;
  if (runtime) internal::plan_owners(managed, ranks, runtime->comm_context()->owned_bytes());
  const auto resolved =
      internal::resolve_reshard_after_forward("fully_shard", options.reshard_after_forward, mesh);
  auto unit =
      std::make_shared<Unit>(internal::UnitPolicy{.reshard_after_forward = resolved.reshards});
  unit->device = internal::device_of_unit(managed, mesh);
  unit->precision = options.mp_policy;
  unit->gradient_codecs = options.gradient_codecs;
  unit->offload = options.offload_policy;
  unit->outer = options.outer;
  unit->ignore(options.ignored_params);
  shard_parameters(mesh, managed, unit, resolved.neighbours);
  internal::move_buffers(managed.buffers, unit->device);
  if (options.mp_policy.buffer_dtype) unit->buffers.take(managed.buffers);
  unit->cast_buffers();
  adopt_units(unit, managed);
  for (auto* module : modules) internal::attach_unit(*module, unit);
  return internal::handle_of(std::move(unit));
}

FSDPModule fully_shard(ModuleRef module, const DeviceMesh& mesh, FullyShardOptions options) {
  return fully_shard(std::vector<torch::nn::Module*>{module.get()}, mesh, std::move(options));
}

bool is_fsdp_module(ConstModuleRef module) {
  return internal::find_unit(internal::given_module("is_fsdp_module", module)) != nullptr;
}

FSDPModule get_fsdp_module(ModuleRef module) {
  const auto& given = internal::given_module("get_fsdp_module", module);
  auto unit = internal::find_unit(given);
  TORCH_CHECK_VALUE(unit != nullptr,
                    "get_fsdp_module: fully_shard was not applied to this module (",
                    internal::module_type_name(given), ")");
  return internal::handle_of(std::move(unit));
}

std::vector<FSDPModule> fsdp_modules(ModuleRef module, bool root_only) {
  std::vector<FSDPModule> units;
  std::unordered_set<const internal::Unit*> known;
  const ModuleTree tree({&internal::given_module("fsdp_modules", module)});
  for (size_t i = 0; i < tree.size(); ++i) {
    if (!tree.unit(i) || (root_only && !tree.unit(i)->is_root())) continue;
    if (known.insert(tree.unit(i).get()).second) units.push_back(internal::handle_of(tree.unit(i)));
  }
  return units;
}

int64_t store_codes(ModuleRef module) {
  std::vector<std::pair<internal::FSDPParamGroup*, std::vector<int64_t>>> to_store;
  int64_t count = 0;
  for (const auto& unit : fsdp_modules(module)) {
    auto* const group = internal::unit_of(unit)->group();
    if (group == nullptr) continue;
    to_store.emplace_back(group, internal::parameters_to_store(*group));
    count += static_cast<int64_t>(to_store.back().second.size());
  }
  for (const auto& [group, parameters] : to_store) internal::store_codes(*group, parameters);
  return count;
}

FSDPModule replicate(const std::vector<torch::nn::Module*>& modules, const DeviceMesh& mesh,
                     FullyShardOptions options) {
  return fully_shard(modules, of_replicas(mesh), std::move(options));
}

FSDPModule replicate(ModuleRef module, const DeviceMesh& mesh, FullyShardOptions options) {
  return replicate(std::vector<torch::nn::Module*>{module.get()}, mesh, std::move(options));
}

std::shared_ptr<torch::nn::Module> adopt(const torch::jit::Module& module) {
  const auto type = module.type()->name();
  const std::string name = type ? type->name() : "TorchScript module";
  auto adopted = std::make_shared<AdoptedModule>(name, module);
  TORCH_CHECK_VALUE(!adopted->parameters().empty() || !adopted->buffers().empty(), "adopt: ", name,
                    " has neither parameters nor buffers: torch::jit::freeze makes them "
                    "constants, which nothing can shard or train; adopt it before, or leave it "
                    "out");
  return adopted;
}

void separate_storages(ModuleRef module) {
  auto& root = internal::given_module("separate_storages", module);
  internal::separate_slices(root, {.caller = "separate_storages", .rank = ""});
}

}  // namespace fsdp
