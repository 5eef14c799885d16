#include "fully_shard/units/validation.h"

#include "dtensor/dtensor.h"
#include "fully_shard/units/unit_table.h"
#include "on_demand/on_demand_storage.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>

#include <map>
#include <set>
#include <typeinfo>

namespace fsdp::internal {
namespace {

void validate_module(const torch::nn::Module& module, const DeviceMesh& mesh) {
  const auto type = module_type_name(module);
  TORCH_CHECK_VALUE(
      !module.weak_from_this().expired(), "fully_shard: module ", type,
      " is not owned by a std::shared_ptr (is it on the stack, or held by value?); make it with "
      "std::make_shared or a ModuleHolder (rank ",
      mesh.rank(), ")");
  TORCH_CHECK_VALUE(!is_container_without_forward(module), "fully_shard: module ", type,
                    " is a container without forward; apply fully_shard to its elements, or to a "
                    "vector of them to "
                    "make them one unit (rank ",
                    mesh.rank(), ")");
  TORCH_CHECK_VALUE(find_unit(module) == nullptr, "fully_shard: it was already applied to module ",
                    type, "; apply it once (rank ", mesh.rank(), ")");
}

void validate_options(const FullyShardOptions& options) {
  const auto& policy = options.mp_policy;
  TORCH_CHECK_NOT_IMPLEMENTED(
      !options.reshard_after_forward || !options.reshard_after_forward->world(),
      "fully_shard: ReshardAfterForward::to_world(n) is not implemented yet; use true or false");
  TORCH_CHECK_NOT_IMPLEMENTED(
      !policy.param_dtype && !policy.reduce_dtype && !policy.output_dtype,
      "fully_shard: mp_policy (param_dtype, reduce_dtype, output_dtype) is not implemented yet");
  TORCH_CHECK_NOT_IMPLEMENTED(!options.offload_policy.offload_to_cpu,
                              "fully_shard: offload_policy.offload_to_cpu is not implemented yet");
}

void validate_placement(const FoundParam& param, const std::string& name,
                        const FullyShardOptions& options) {
  if (!options.shard_placement_fn) return;
  const auto placement = options.shard_placement_fn(name, param.tensor);
  if (!placement) return;
  const auto dim = placement->dim < 0 ? placement->dim + param.tensor.dim() : placement->dim;
  TORCH_CHECK_VALUE(dim >= 0 && dim < param.tensor.dim(),
                    "fully_shard: shard_placement_fn gave Shard(", placement->dim,
                    ") for parameter '", name, "' of ", param.tensor.dim(), " dimensions");
  TORCH_CHECK_NOT_IMPLEMENTED(dim == 0, "fully_shard: shard_placement_fn gave Shard(",
                              placement->dim, ") for parameter '", name,
                              "'; only Shard(0) is implemented yet");
}

void validate_parameter(const at::Tensor& tensor, const std::string& name, const DeviceMesh& mesh) {
  const auto where = c10::str("fully_shard: parameter '", name, "' of shape ", tensor.sizes());
  TORCH_CHECK_VALUE(!is_dtensor(tensor), where,
                    " is a DTensor already. Apply fully_shard bottom-up: to submodules before the "
                    "modules that contain "
                    "them (rank ",
                    mesh.rank(), ")");
  TORCH_CHECK_VALUE(tensor.dim() > 0, where,
                    " is a scalar; make it a tensor of one dimension and one element (rank ",
                    mesh.rank(), ")");
  TORCH_CHECK_VALUE(!tensor.is_meta(), where, " is on the meta device; materialise it first (rank ",
                    mesh.rank(), ")");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided && tensor.is_contiguous(), where,
                    " and strides ", tensor.strides(),
                    " is not contiguous; call contiguous() before fully_shard (rank ", mesh.rank(),
                    ")");
  TORCH_CHECK_VALUE(tensor.device().type() == mesh.device_type(), where, " is on ", tensor.device(),
                    " but the mesh is of device type ",
                    c10::DeviceTypeName(mesh.device_type(), true), " (rank ", mesh.rank(), ")");
  TORCH_CHECK_VALUE(tensor.is_leaf() && !tensor.is_inference(), where,
                    " is not a leaf, or was made in inference mode (rank ", mesh.rank(), ")");
  TORCH_CHECK_VALUE(!tensor.grad().defined(), where,
                    " has a gradient, which would be lost; call zero_grad() first (rank ",
                    mesh.rank(), ")");
}

// Sharing a TensorImpl is a tie, which is kept; sharing memory only would be silently
// untied.
void validate_distinct_storage(const ManagedModules& managed, const DeviceMesh& mesh) {
  std::map<const c10::StorageImpl*, std::string> names;
  for (const auto& param : managed.params) {
    if (is_dtensor(param.tensor) || param.tensor.numel() == 0) continue;
    const auto* storage = param.tensor.storage().unsafeGetStorageImpl();
    const auto& name = param.slots.front().path;
    const auto [found, is_new] = names.emplace(storage, name);
    TORCH_CHECK_VALUE(is_new, "fully_shard: parameters '", found->second, "' and '", name,
                      "' share memory without being one tensor; register the same tensor twice to "
                      "tie them, or clone one "
                      "(rank ",
                      mesh.rank(), ")");
  }
}

void validate_ignored(const std::vector<torch::nn::Module*>& modules,
                      const FullyShardOptions& options) {
  std::set<const c10::TensorImpl*> known;
  for (const auto* module : modules) {
    for (const auto& tensor : module->parameters()) known.insert(tensor.unsafeGetTensorImpl());
  }
  for (size_t i = 0; i < options.ignored_params.size(); ++i) {
    TORCH_CHECK_VALUE(known.contains(options.ignored_params[i].unsafeGetTensorImpl()),
                      "fully_shard: ignored_params[", i, "] of shape ",
                      options.ignored_params[i].sizes(), " is no parameter of the module");
  }
}

}  // namespace

bool is_container_without_forward(const torch::nn::Module& module) {
  return dynamic_cast<const torch::nn::ModuleListImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::ModuleDictImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::ParameterListImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::ParameterDictImpl*>(&module) != nullptr;
}

std::string module_type_name(const torch::nn::Module& module) {
  return c10::demangle(typeid(module).name());
}

void validate_request(const std::vector<torch::nn::Module*>& modules, const DeviceMesh& mesh,
                      const FullyShardOptions& options) {
  TORCH_CHECK_VALUE(!modules.empty(), "fully_shard: the list of modules is empty (rank ",
                    mesh.rank(), ")");
  for (const auto* module : modules) validate_module(*module, mesh);
  TORCH_CHECK_NOT_IMPLEMENTED(
      mesh.ndim() == 1, "fully_shard: mesh ", to_string(mesh), " has ", mesh.ndim(),
      " dimensions; hybrid sharding is not implemented yet, use a 1-D mesh or a slice");
  validate_options(options);
}

void validate_parameters(const std::vector<torch::nn::Module*>& modules,
                         const ManagedModules& managed, const DeviceMesh& mesh,
                         const FullyShardOptions& options) {
  for (const auto& param : managed.params) {
    if (OnDemandStorage::of(param.tensor.unsafeGetTensorImpl()) != nullptr)
      continue;  // tied to another unit's
    const auto& name = param.slots.front().path;
    validate_parameter(param.tensor, name, mesh);
    validate_placement(param, name, options);
  }
  validate_distinct_storage(managed, mesh);
  validate_ignored(modules, options);
}

}  // namespace fsdp::internal
