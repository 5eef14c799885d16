#include "on_demand/gate.h"

#include "deferred_init/deferred_storage.h"
#include "deferred_init/recorder.h"
#include "on_demand/entry_substitution.h"
#include "on_demand/fast_gate.h"
#include "on_demand/gate_arguments.h"
#include "on_demand/gate_key.h"
#include "on_demand/input_cast.h"
#include "on_demand/on_demand_storage.h"
#include "on_demand/replicated_members.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

using c10::DispatchKeySet;

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
  void check_shapes(const c10::OperatorHandle& op) const { members_.check_shapes(op); }

 private:
  using Keeper = c10::intrusive_ptr<Touchable>;

  void add(OnDemandStorage* storage, c10::TensorImpl* impl, bool writes) {
    storage->synchronize_metadata(impl);
    if (keepers_.empty() || keepers_.back().get() != &storage->group())
      keepers_.push_back(Keeper::reclaim_copy(&storage->group()));
    groups_.add(*storage);
    if (!writes || storage->writable_group() == nullptr) return;
    written_.push_back(storage);
    members_.add(*storage, impl);
  }

  c10::SmallVector<Keeper, 4> keepers_;  // outlives groups_
  TouchedGroups groups_;
  c10::SmallVector<OnDemandStorage*, 2> written_;
  WrittenMembers members_;
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

void register_gate_kernels() {
  // Never destroyed: kernels stay for the life of the process.
  static auto& handles = *new std::vector<c10::RegistrationHandleRAII>();
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

void WrittenMembers::add(const OnDemandStorage& storage, c10::TensorImpl* impl) {
  const auto* const group = storage.writable_group();
  if (group == nullptr || !group->is_member(storage.index(), impl)) return;
  members_.push_back({&storage, impl, impl->sizes().vec(), impl->strides().vec()});
}

void WrittenMembers::check_shapes(const c10::OperatorHandle& op) const {
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

}  // namespace fsdp::internal
