#include "on_demand/gate.h"

#include "deferred_init/deferred_storage.h"
#include "deferred_init/recorder.h"
#include "device_mesh/internal/accelerator.h"
#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "on_demand/gate_arguments.h"
#include "on_demand/gate_key.h"
#include "on_demand/on_demand_storage.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

using c10::DispatchKeySet;
using Handles = std::vector<c10::RegistrationHandleRAII>;

OnDemandStorage* storage_at_gate(const at::Tensor& tensor) {
  return meets_gate(tensor) ? OnDemandStorage::behind(tensor) : nullptr;
}

void synchronize_metadata(const GateArguments& arguments) {
  arguments.for_each([](const at::Tensor& tensor, bool) {
    if (auto* const storage = storage_at_gate(tensor))
      storage->synchronize_metadata(tensor.unsafeGetTensorImpl());
  });
}

// What the operator does to on-demand tensors. The stack gives its arguments up while the
// operator runs, so this keeps their storages.
//
// The operator may change the values of the parameters that it writes, not their shape:
// out= with a result of another size and transpose_() would part a parameter from its
// shards.
class Touch {
 public:
  explicit Touch(const GateArguments& arguments) {
    arguments.for_each([this](const at::Tensor& tensor, bool writes) {
      if (auto* const storage = storage_at_gate(tensor))
        add(storage, tensor.unsafeGetTensorImpl(), writes);
    });
  }
  void begin() {
    if (!written_.empty()) groups_.await_failed_backwards();
    for (auto* storage : written_) storage->writable_group()->before_member_write(storage->index());
    groups_.fill();
    for (auto* storage : written_) storage->writable_group()->member_written(storage->index());
  }
  // Gives every parameter its shape back, and throws for the first that lost it.
  void check_shapes(const c10::OperatorHandle& op) const {
    for (const auto& member : members_) {
      if (member.impl->sizes() == at::IntArrayRef(member.sizes) &&
          member.impl->strides() == at::IntArrayRef(member.strides)) {
        continue;
      }
      const auto changed = member.impl->sizes().vec();
      member.impl->set_sizes_and_strides(member.sizes, member.strides);
      TORCH_CHECK_VALUE(false, op.schema().name(), " would change the shape of parameter '",
                        member.storage->parameter_name(), "' from ", at::IntArrayRef(member.sizes),
                        " to ", at::IntArrayRef(changed),
                        ": a sharded parameter keeps its shape; change it before fully_shard, or "
                        "write to a view");
    }
  }

 private:
  using Keeper = c10::intrusive_ptr<Touchable>;
  struct WrittenMember {
    const OnDemandStorage* storage;
    c10::TensorImpl* impl;
    std::vector<int64_t> sizes, strides;
  };

  void add(OnDemandStorage* storage, c10::TensorImpl* impl, bool writes) {
    storage->synchronize_metadata(impl);
    if (keepers_.empty() || keepers_.back().get() != &storage->group())
      keepers_.push_back(Keeper::reclaim_copy(&storage->group()));
    groups_.add(*storage);
    auto* const group = storage->writable_group();
    if (!writes || group == nullptr) return;
    written_.push_back(storage);
    // Views of parameters are left out: their shape is their own.
    if (group->is_member(storage->index(), impl))
      members_.push_back({storage, impl, impl->sizes().vec(), impl->strides().vec()});
  }

  c10::SmallVector<Keeper, 4> keepers_;  // outlives groups_; members outlive the call
  TouchedGroups groups_;
  c10::SmallVector<OnDemandStorage*, 2> written_;
  c10::SmallVector<WrittenMember, 1> members_;
};

void run_below(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack,
               bool is_aten) {
  std::optional<c10::impl::ExcludeDispatchKeyGuard> excluded;
  std::optional<OuterOperator> outer;
  if (is_aten) {
    excluded.emplace(kGateKey);
  } else {
    outer.emplace();
  }
  op.redispatchBoxed(below_gate(keys), stack);
}

// torch::load makes tensors of a file's memory so.
void refuse_memory_for_deferred(const c10::OperatorHandle& op, const GateArguments& arguments) {
  bool has_memory = false, is_deferred = false;
  for (size_t i = 0; i < arguments.size(); ++i) has_memory |= arguments[i].isStorage();
  arguments.for_each([&](const at::Tensor& tensor, bool) {
    is_deferred |= DeferredStorage::of(tensor) != nullptr;
  });
  TORCH_CHECK_VALUE(!has_memory || !is_deferred, "deferred_init: ", op.schema().name(),
                    " would give a tensor that has no values yet memory that exists already "
                    "(torch::load inside of deferred_init does). Build the model in it, call "
                    "fsdp::materialize(model), and load files then");
}

// set_(), resize_(), set_data() and copy-on-write clones would part a parameter from its
// sharded storage without a trace.
void refuse_new_storage(const c10::OperatorHandle& op, DispatchKeySet keys,
                        torch::jit::Stack* stack) {
  const GateArguments arguments(op, *stack);
  refuse_memory_for_deferred(op, arguments);
  if (record_if_deferred(op, keys, stack)) return;
  arguments.for_each([&op](const at::Tensor& tensor, bool) {
    auto* const storage = storage_at_gate(tensor);
    TORCH_CHECK_VALUE(storage == nullptr, op.schema().name(), " on parameter '",
                      storage->parameter_name(),
                      "': a sharded parameter's storage can not be replaced, resized or shared "
                      "copy-on-write; use copy_() or clone(). To load a file while a "
                      "SummonFullParams shows full parameters, close it first");
  });
  run_below(op, keys, stack, arguments.is_aten());
}

// Tensor::set_data replaces a tensor's data behind the dispatcher's back, but asks
// _has_compatible_shallow_copy_type first. Here it is refused where it would part a
// parameter from its sharded storage, and made right for registry entries, which is how
// Module::to(dtype) works on a sharded module.

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

void register_set_data_kernels(Handles& handles) {
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

// Besides those of on_demand/fast_gate.cc.
constexpr const char* kAliasingOperators[] = {
    "view.dtype",   "expand_as",       "unfold", "diagonal",    "view_as",
    "view_as_real", "view_as_complex", "_conj",  "_neg_view",   "numpy_T",
    "movedim.int",  "unflatten.int",   "mT",     "squeeze.dims"};

// reshape is its parts, which come back one by one.
constexpr const char* kIgnoredOperators[] = {
    "reshape",    "detach",         "alias",    "size.int",  "sym_size.int", "stride.int",
    "is_leaf",    "requires_grad_", "_version", "output_nr", "retain_grad",  "is_floating_point",
    "is_complex", "is_same_size",   "is_conj",  "is_neg"};

constexpr const char* kStorageOperators[] = {
    "set_",    "set_.source_Tensor", "set_.source_Storage", "set_.source_Storage_storage_offset",
    "resize_", "resize_as_",         "_lazy_clone",         "set_.source_Tensor_storage_offset"};

c10::OperatorName aten_name(std::string_view name) {
  const auto dot = name.find('.');
  return {"aten::" + std::string(name.substr(0, dot)),
          dot == std::string_view::npos ? std::string() : std::string(name.substr(dot + 1))};
}

void register_gate_kernels(Handles& handles) {
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto add = [&](std::string_view name, c10::KernelFunction kernel) {
    const auto full_name = aten_name(name);
    if (!dispatcher.findOp(full_name)) return;
    handles.push_back(dispatcher.registerImpl(full_name, kGateKey, std::move(kernel), std::nullopt,
                                              nullptr, "fsdp"));
  };
  for (const auto* name : kAliasingOperators)
    add(name, c10::KernelFunction::makeFromBoxedFunction<&aliasing_gate>());
  for (const auto* name : kIgnoredOperators) add(name, c10::KernelFunction::makeFallthrough());
  for (const auto* name : kStorageOperators) {
    add(name, c10::KernelFunction::makeFromBoxedFunction<&refuse_new_storage>());
  }
  register_fast_gates(handles);
  handles.push_back(dispatcher.registerFallback(
      kGateKey, c10::KernelFunction::makeFromBoxedFunction<&touching_gate>(), "fsdp"));
}

}  // namespace

void touching_gate(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  if (record_if_deferred(op, keys, stack)) return;
  GateArguments arguments(op, *stack);
  if (substitute_entries(arguments)) return op.callBoxed(stack);
  if (replicate_members(arguments)) return op.callBoxed(stack);
  if (call_with_cast_inputs(op, arguments, stack)) return;
  const bool is_aten = arguments.is_aten();
  Touch touch(arguments);
  touch.begin();
  try {
    run_below(op, keys, stack, is_aten);
  } catch (...) {
    touch.check_shapes(op);  // what resized a parameter says so, by name
    throw;
  }
  touch.check_shapes(op);
}

void aliasing_gate(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  GateArguments arguments(op, *stack);
  if (substitute_entries(arguments)) return op.callBoxed(stack);
  synchronize_metadata(arguments);
  TouchedGroups groups;
  arguments.for_each([&groups](const at::Tensor& tensor, bool) {
    const auto* const storage = storage_at_gate(tensor);
    if (storage != nullptr && may_read_to_alias(tensor)) groups.add(*storage);
  });
  groups.fill();
  run_below(op, keys, stack, arguments.is_aten());
}

void install_gate() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Never destroyed: kernels stay for the life of the process.
    static auto& handles = *new std::vector<c10::RegistrationHandleRAII>();
    register_gate_kernels(handles);
    register_set_data_kernels(handles);
  });
}

}  // namespace fsdp::internal
