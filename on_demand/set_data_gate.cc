#include "on_demand/set_data_gate.h"

#include "deferred_init/deferred_storage.h"
#include "device_mesh/internal/device_types.h"
#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "on_demand/gate_key.h"
#include "on_demand/on_demand_storage.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <vector>

namespace fsdp::internal {
namespace {

using Compatible = bool(const at::Tensor&, const at::Tensor&);

const c10::TypedOperatorHandle<Compatible>& compatible_operator() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("aten::_has_compatible_shallow_copy_type", "")
                             .typed<Compatible>();
  return op;
}

void refuse_members(const at::Tensor& tensor) {
  auto* const storage = OnDemandStorage::behind(tensor);
  TORCH_CHECK_VALUE(storage == nullptr, "set_data on or from parameter '",
                    storage->parameter_name(),
                    "': a sharded parameter's storage can not be replaced or moved to another "
                    "device; use copy_()");
}

// What a tape computes and what a file holds are not of one kind.
void refuse_half_deferred(const at::Tensor& self, const at::Tensor& from) {
  const bool self_is = DeferredStorage::of(held_part(self)) != nullptr;
  const bool from_is = DeferredStorage::of(held_part(from)) != nullptr;
  TORCH_CHECK_VALUE(self_is == from_is, "set_data (torch::load uses it) on a tensor of shape ",
                    self.sizes(), self_is ? " that has no values yet" : "", " from one of shape ",
                    from.sizes(), from_is ? " that has no values yet" : "",
                    ": of a model made by fsdp::deferred_init, first call "
                    "fsdp::materialize(model), then load or replace its data");
}

// Under the gate's key: one of the two is a member, a registry entry, or deferred.
bool compatible_at_gate(const at::Tensor& self, const at::Tensor& from) {
  refuse_half_deferred(self, from);
  refuse_members(self);
  refuse_members(from);
  auto* const owner = is_dtensor(self) && !self.is_same(from) ? owner_of(self) : nullptr;
  if (owner != nullptr) {
    tell_read(from);
    owner->before_set_data(self, from);
  }
  const c10::impl::ExcludeDispatchKeyGuard excluded(kGateKey);
  return compatible_operator().call(self, from);
}

// Above the operator's composite kernel, for all tensors.
bool compatible_at_autograd(c10::DispatchKeySet keys, const at::Tensor& self,
                            const at::Tensor& from) {
  TORCH_CHECK_VALUE(is_dtensor(self) || !is_dtensor(from), "set_data on a plain tensor of shape ",
                    self.sizes(),
                    " from a DTensor (Module::clone of a sharded module?): a copy would not be "
                    "sharded as a unit. Build a "
                    "new module, apply fully_shard to it and copy the registry entries");
  return compatible_operator().redispatch(keys & c10::after_autograd_keyset, self, from);
}

}  // namespace

void register_set_data_kernels() {
  // Leaked on purpose: kernels stay for the life of the process.
  static auto& handles = *new std::vector<c10::RegistrationHandleRAII>();
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto& name = compatible_operator().operator_name();
  handles.push_back(dispatcher.registerImpl(
      name, kGateKey, c10::KernelFunction::makeFromUnboxedRuntimeFunction(&compatible_at_gate),
      std::nullopt, nullptr, "fsdp"));
  // Not under the alias Autograd, before which the composite kernel would win.
  auto keys = accelerator_keys(c10::DispatchKey::AutogradFunctionality);
  keys.push_back(c10::DispatchKey::AutogradCPU);
  for (const auto key : keys) {
    handles.push_back(dispatcher.registerImpl(
        name, key, c10::KernelFunction::makeFromUnboxedRuntimeFunction(&compatible_at_autograd),
        std::nullopt, nullptr, "fsdp"));
  }
}

}  // namespace fsdp::internal
