#include "fully_shard/units/validation.h"

#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/transport/comm_context.h"
#include "fully_shard/units/module_tree.h"
#include "fully_shard/units/unit.h"
#include "on_demand/deferred_part.h"
#include "on_demand/gate_key.h"
#include "on_demand/on_demand_storage.h"

#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <set>
#include <vector>

namespace fsdp::internal {
namespace {

std::vector<int64_t> divisors_of(int64_t number) {
  std::vector<int64_t> divisors;
  for (int64_t i = 1; i <= number; ++i) {
    if (number % i == 0) divisors.push_back(i);
  }
  return divisors;
}

void validate_module(const torch::nn::Module& module, const DeviceMesh& mesh) {
  const auto type = module_type_name(module);
  TORCH_CHECK_VALUE(
      !module.weak_from_this().expired(), "fully_shard: module ", type,
      " is not owned by a std::shared_ptr (is it on the stack, or held by value?); make it with "
      "std::make_shared or a ModuleHolder. A model that stays so can be one unit of the modules "
      "that it has pointers of, fully_shard({model.first.get(), model.second.get()}) (rank ",
      mesh.rank(), ")");
  TORCH_CHECK_VALUE(!is_container_without_forward(module), "fully_shard: module ", type,
                    " is a container without forward; apply fully_shard to its elements, or to a "
                    "vector of them to "
                    "make them one unit (rank ",
                    mesh.rank(), ")");
  TORCH_CHECK_VALUE(find_unit(module) == nullptr, "fully_shard: it was already applied to module ",
                    type, "; apply it once (rank ", mesh.rank(), ")");
}

void validate_dtype(const char* option, std::optional<at::ScalarType> dtype,
                    const DeviceMesh& mesh) {
  if (!dtype) return;
  const bool allowed = *dtype == at::kHalf || *dtype == at::kBFloat16 || *dtype == at::kFloat ||
                       *dtype == at::kDouble;
  TORCH_CHECK_VALUE(allowed, "fully_shard: mp_policy.", option, " is ", *dtype,
                    "; allowed: Half, BFloat16, Float, Double (rank ", mesh.rank(), ")");
}

void validate_options(const FullyShardOptions& options, const DeviceMesh& mesh) {
  const auto& policy = options.mp_policy;
  validate_dtype("param_dtype", policy.param_dtype, mesh);
  validate_dtype("reduce_dtype", policy.reduce_dtype, mesh);
  validate_dtype("buffer_dtype", policy.buffer_dtype, mesh);
  validate_dtype("output_dtype", policy.output_dtype, mesh);
  TORCH_CHECK_VALUE(options.outer == Outer::kReplicate || mesh.ndim() == 2,
                    "fully_shard: outer is kShardOptimizer on ", to_string(mesh), " of ",
                    mesh.ndim(), " dimensions; it needs two, of which the first is the outer one ",
                    "(init_hybrid_mesh makes such a mesh; rank ", mesh.rank(), ")");
}

// A member of parallelize_module, which lies on a mesh of its own.
bool is_tensor_parallel(const at::Tensor& tensor) {
  return meta_of(tensor).style && (!owner_of(tensor) || is_deferred_part(tensor));
}

void validate_mesh_beside(const at::Tensor& member, const std::string& where,
                          const DeviceMesh& mesh) {
  try {
    static_cast<void>(spec_of(member).mesh().beside(mesh));
  } catch (const c10::ValueError& error) {
    TORCH_CHECK_VALUE(false, where, " is tensor-parallel, and ", error.what_without_backtrace());
  }
}

// Before anything asks for a device of the mesh's type, which may not be there.
void validate_device_types(const at::Tensor& tensor, const std::string& where,
                           const DeviceMesh& mesh) {
  if (!is_dtensor(tensor)) return;
  const auto own = spec_of(tensor).mesh().device_type();
  TORCH_CHECK_VALUE(own == mesh.device_type(), where,
                    " is tensor-parallel on a mesh of device type ", c10::DeviceTypeName(own, true),
                    ", but the mesh to shard over is of type ",
                    c10::DeviceTypeName(mesh.device_type(), true), " (rank ", mesh.rank(), ")");
}

void validate_parameter(const at::Tensor& tensor, const std::string& name, const DeviceMesh& mesh) {
  const auto where = c10::str("fully_shard: parameter '", name, "' of shape ", tensor.sizes());
  const bool may_be_sharded = !is_dtensor(tensor) || is_tensor_parallel(tensor);
  TORCH_CHECK_VALUE(may_be_sharded || owner_of(tensor), where,
                    " is a DTensor of no unit's; register the plain tensor, its full_tensor() "
                    "(collective; rank ",
                    mesh.rank(), ")");
  TORCH_CHECK_VALUE(
      may_be_sharded, where,
      " is a DTensor already: a unit has it. If that is a module around this one: apply "
      "fully_shard bottom-up, to submodules before the modules that contain them. If it is "
      "another one that shares the sub-module with this (an encoder used by two models): make "
      "the shared sub-module a unit of its own, before either of them (rank ",
      mesh.rank(), ")");
  TORCH_CHECK_VALUE(tensor.dim() > 0, where,
                    " is a scalar; make it a tensor of one dimension and one element (rank ",
                    mesh.rank(), ")");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided && tensor.is_contiguous(), where,
                    " and strides ", tensor.strides(),
                    " is not contiguous; call contiguous() before fully_shard (rank ", mesh.rank(),
                    ")");
  validate_device_types(tensor, where, mesh);
  TORCH_CHECK_VALUE(!tensor.is_conj() && !tensor.is_neg(), where,
                    " is a conjugation or negation that is not computed yet; register "
                    "resolve_conj().resolve_neg() of it (rank ",
                    mesh.rank(), ")");
  const bool fits = tensor.is_meta() || device_in_unit(tensor, mesh).type() == mesh.device_type();
  TORCH_CHECK_VALUE(fits, where, " is on ", tensor.device(), " but the mesh is of device type ",
                    c10::DeviceTypeName(mesh.device_type(), true), " (rank ", mesh.rank(), ")");
  if (is_dtensor(tensor)) validate_mesh_beside(tensor, where, mesh);
  TORCH_CHECK_VALUE(tensor.is_leaf() && !tensor.is_inference(), where,
                    " is not a leaf, or was made in inference mode (rank ", mesh.rank(), ")");
  TORCH_CHECK_VALUE(!tensor.grad().defined(), where,
                    " has a gradient, which would be lost; call zero_grad() first (rank ",
                    mesh.rank(), ")");
}

// One buffer holds a unit's shards.
void validate_one_device(const std::vector<const FoundParam*>& fresh, const DeviceMesh& mesh) {
  for (const auto* param : fresh) {
    const bool together =
        device_in_unit(param->tensor, mesh) == device_in_unit(fresh.front()->tensor, mesh);
    TORCH_CHECK_VALUE(together, "fully_shard: parameter '", param->path, "' is on ",
                      param->tensor.device(), " but parameter '", fresh.front()->path,
                      "' of the same unit on ", fresh.front()->tensor.device(),
                      "; move the unit to one device (rank ", mesh.rank(), ")");
  }
}

// Neither entry nor member of a unit.
void validate_is_not_sharded(const at::Tensor& ignored, size_t index) {
  TORCH_CHECK_VALUE(!is_dtensor(ignored) && OnDemandStorage::behind(ignored) == nullptr,
                    "fully_shard: ignored_params[", index, "] of shape ", ignored.sizes(),
                    " is sharded by a unit already; ignore it in the call that would shard it");
}

void validate_ignored(const std::vector<torch::nn::Module*>& modules,
                      const FullyShardOptions& options) {
  std::set<const c10::TensorImpl*> known;
  const ModuleTree tree(modules);
  for (size_t i = 0; i < tree.size(); ++i) {
    for_each_registered(tree.module(i), [&known](const std::string&, const at::Tensor& tensor) {
      if (tensor.defined()) known.insert(tensor.unsafeGetTensorImpl());
    });
  }
  for (size_t i = 0; i < options.ignored_params.size(); ++i) {
    validate_is_not_sharded(options.ignored_params[i], i);
    TORCH_CHECK_VALUE(known.contains(options.ignored_params[i].unsafeGetTensorImpl()),
                      "fully_shard: ignored_params[", i, "] of shape ",
                      options.ignored_params[i].sizes(), " is no parameter of the module");
  }
}

}  // namespace

ResolvedReshardAfterForward resolve_reshard_after_forward(
    const char* caller, const std::optional<ReshardAfterForward>& asked, const DeviceMesh& mesh) {
  if (!asked) return {};
  const auto n = asked->world();
  if (!n) return {.reshards = asked->reshards()};
  const auto shards = mesh.size(shard_mesh_dim(mesh));
  TORCH_CHECK_VALUE(*n >= 1 && *n <= shards && shards % *n == 0, caller,
                    ": ReshardAfterForward::to_world(", *n, ") on ", shards,
                    " ranks that shard; allowed are ", c10::IntArrayRef(divisors_of(shards)),
                    " (rank ", mesh.rank(), ")");
  if (*n == 1) {
    TORCH_WARN_ONCE(caller,
                    ": ReshardAfterForward::to_world(1) keeps the parameters unsharded, as "
                    "false does; true frees them");
    return {.reshards = false};
  }
  if (*n == shards) return {.reshards = true};
  return {.reshards = true, .neighbours = n};
}

void validate_request(const std::vector<torch::nn::Module*>& modules, const DeviceMesh& mesh,
                      const FullyShardOptions& options) {
  TORCH_CHECK_VALUE(!c10::impl::tls_is_dispatch_key_included(kGateKey),
                    "fully_shard: called inside of deferred_init; call it when that has returned "
                    "the model (rank ",
                    mesh.rank(), ")");
  TORCH_CHECK_VALUE(!modules.empty(), "fully_shard: the list of modules is empty (rank ",
                    mesh.rank(), ")");
  for (size_t i = 0; i < modules.size(); ++i) {
    TORCH_CHECK_VALUE(
        modules[i] != nullptr, "fully_shard: module ", i, " of ", modules.size(),
        " is null (a failed dynamic_cast, or a shared_ptr that was never set?) (rank ", mesh.rank(),
        ")");
    validate_module(*modules[i], mesh);
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      mesh.ndim() <= 2, "fully_shard: mesh ", to_string(mesh), " has ", mesh.ndim(),
      " dimensions; it takes one (shards) or two (replicates, then shards): use a slice");
  validate_options(options, mesh);
}

void validate_parameters(const std::vector<torch::nn::Module*>& modules,
                         const ManagedModules& managed, const StorageUsers& users,
                         const DeviceMesh& mesh, const FullyShardOptions& options) {
  std::vector<const FoundParam*> fresh;
  for (const auto& param : managed.params) {
    if (param.is_tied_to_a_unit()) continue;
    validate_parameter(param.tensor, param.path, mesh);
    fresh.push_back(&param);
  }
  validate_one_device(fresh, mesh);
  validate_storages(users, fresh, {"fully_shard", c10::str(" (rank ", mesh.rank(), ")")});
  validate_ignored(modules, options);
}

c10::Device device_in_unit(const at::Tensor& tensor, const DeviceMesh& mesh) {
  const bool stays = !tensor.is_cpu() || mesh.device_type() == c10::kCPU;
  return stays ? tensor.device() : local_device(mesh);
}

c10::Device device_of_unit(const ManagedModules& managed, const DeviceMesh& mesh) {
  for (const auto& param : managed.params) {
    if (!param.tensor.is_meta()) return device_in_unit(param.tensor, mesh);
  }
  return local_device(mesh);
}

void move_buffers(const std::vector<at::Tensor>& buffers, c10::Device device) {
  if (device.is_cpu()) return;
  const at::NoGradGuard no_grad;
  for (const auto& buffer : buffers) {
    if (!buffer.is_cpu() || is_dtensor(buffer)) continue;
    // As parameters are moved: set_data() knows the way from the CPU to CUDA only.
    const auto moved = buffer.detach().to(device);
    buffer.unsafeGetTensorImpl()->shallow_copy_from(moved.getIntrusivePtr());
  }
}

}  // namespace fsdp::internal
