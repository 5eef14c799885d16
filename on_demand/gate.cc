#include "on_demand/gate.h"

#include "dtensor/dtensor.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/dtensor_key.h"
#include "on_demand/gate_key.h"
#include "on_demand/on_demand_storage.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <string_view>
#include <vector>

namespace fsdp::internal {
namespace {

using c10::DispatchKeySet;
using c10::IValue;

bool meets_gate(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->key_set().has(kGateKey);
}

thread_local int64_t operator_depth = 0;

// The groups of one operator: collected and pinned first, then filled, unpinned when the
// operator is done.
class TouchedGroups {
 public:
  TouchedGroups() { ++operator_depth; }
  ~TouchedGroups() {
    --operator_depth;
    for (auto* group : groups_) group->unpin();
    if (operator_depth == 0 && evict_after_every_operator()) {
      for (auto* group : groups_) group->evict_and_poison();
    }
    for (auto* group : groups_) c10::raw::intrusive_ptr::decref(group);
  }
  TouchedGroups(const TouchedGroups&) = delete;

  void add(OnDemandStorage& storage, bool writes) {
    auto* group = &storage.group();
    c10::raw::intrusive_ptr::incref(group);
    group->pin();
    groups_.push_back(group);
    if (writes) written_.push_back(&storage);
  }
  void fill() {
    for (auto* group : groups_) group->touch();
    for (auto* storage : written_) storage->group().mark_written(storage->index());
  }

 private:
  c10::SmallVector<OnDemandGroup*, 8> groups_;
  c10::SmallVector<OnDemandStorage*, 2> written_;
};

// The parameters that one operator writes. It may change their values, not their shape:
// out= with a result of another size and transpose_() would part a parameter from its
// shards.
class WrittenMembers {
 public:
  void add(OnDemandStorage& storage, c10::TensorImpl* impl) {
    if (!storage.group().is_member(storage.index(), impl)) return;
    members_.push_back({&storage, impl, impl->sizes().vec(), impl->strides().vec()});
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
                        member.storage->group().parameter_name(member.storage->index()), "' from ",
                        at::IntArrayRef(member.sizes), " to ", at::IntArrayRef(changed),
                        ": a sharded parameter keeps its shape; change it before fully_shard, or "
                        "write to a view");
    }
  }

 private:
  struct Member {
    OnDemandStorage* storage;
    c10::TensorImpl* impl;
    std::vector<int64_t> sizes, strides;
  };
  c10::SmallVector<Member, 1> members_;
};

// Operators that make a new tensor of the same geometry: no value is read, so nothing is
// replaced.
bool is_factory(std::string_view name) {
  return name.starts_with("aten::new_") || (name.starts_with("aten::") && name.ends_with("_like"));
}

class GateCall {
 public:
  GateCall(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : schema_(op.schema()),
        arguments_(stack.end() - static_cast<int64_t>(schema_.arguments().size())) {}

  template <class Visit>
  void for_each_tensor(const Visit& visit) {
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      auto& value = arguments_[static_cast<int64_t>(i)];
      const auto* alias = schema_.arguments()[i].alias_info();
      const bool writes = alias != nullptr && alias->isWrite();
      if (value.isTensor()) {
        visit(value, writes);
      } else if (value.isTensorList() || (value.isList() && !value.toListRef().empty())) {
        visit_list(value, writes, visit);
      }
    }
  }

  // Replaces registry entries that require grad by their members, under grad mode. True
  // when there were any: the operator must then be dispatched anew, since its key set was
  // that of the entries.
  bool substitute_entries() {
    bool substituted = false;
    if (!c10::GradMode::is_enabled()) return false;
    for_each_tensor([this, &substituted](IValue& value, bool) {
      const auto& tensor = value.toTensor();
      if (!meets_gate(tensor) || !is_registry_entry(tensor) || !tensor.requires_grad() ||
          keeps_entries())
        return;
      auto member = owner_of(tensor)->substitute(tensor);
      if (!member.defined()) return;
      value = std::move(member);
      substituted = true;
    });
    return substituted;
  }

  void synchronize_metadata() {
    for_each_tensor([](IValue& value, bool) {
      const auto& tensor = value.toTensor();
      if (!meets_gate(tensor)) return;
      auto* impl = tensor.unsafeGetTensorImpl();
      if (auto* storage = OnDemandStorage::of(impl))
        storage->group().synchronize_metadata(storage->index(), impl);
    });
  }

  void collect(TouchedGroups& groups, WrittenMembers& written) {
    for_each_tensor([&groups, &written](IValue& value, bool writes) {
      const auto& tensor = value.toTensor();
      if (!meets_gate(tensor)) return;
      auto* impl = tensor.unsafeGetTensorImpl();
      if (auto* storage = OnDemandStorage::of(impl)) {
        storage->group().synchronize_metadata(storage->index(), impl);
        groups.add(*storage, writes);
        if (writes) written.add(*storage, impl);
      }
    });
  }

 private:
  static bool is_registry_entry(const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->key_set().has(kDTensorKey) && owner_of(tensor) != nullptr;
  }

  bool keeps_entries() {
    if (!keeps_entries_)
      keeps_entries_ = schema_.is_mutable() || is_factory(schema_.name()) || converts_nothing();
    return *keeps_entries_;
  }

  // to() that has nothing to convert returns its argument: Module::to(dtype) of the same
  // dtype.
  bool converts_nothing() const {
    if (schema_.name() != "aten::to") return false;
    const auto& self = arguments_->toTensor();
    const auto asks_for = [this](const char* name) {
      const auto index = schema_.argumentIndexWithName(name);
      return index ? arguments_[*index] : IValue();
    };
    const auto dtype = asks_for("dtype"), device = asks_for("device");
    const auto copy = asks_for("copy"), other = asks_for("other");
    return other.isNone() && (dtype.isNone() || dtype.toScalarType() == self.scalar_type()) &&
           (device.isNone() || device.toDevice().type() == self.device().type()) &&
           (copy.isNone() || !copy.toBool());
  }

  // Lists are visited by a copy that is put back only when an element was replaced.
  template <class Visit>
  static void visit_list(IValue& value, bool writes, const Visit& visit) {
    std::vector<IValue> elements = value.toListRef().vec();
    bool replaced = false;
    for (auto& element : elements) {
      if (!element.isTensor()) continue;
      const auto* before = element.toTensor().unsafeGetTensorImpl();
      visit(element, writes);
      replaced |= element.toTensor().unsafeGetTensorImpl() != before;
    }
    if (!replaced) return;
    auto list = c10::impl::GenericList(value.toList().elementType());
    for (auto& element : elements) list.push_back(std::move(element));
    value = IValue(std::move(list));
  }

  const c10::FunctionSchema& schema_;
  torch::jit::Stack::iterator arguments_;
  std::optional<bool> keeps_entries_;
};

DispatchKeySet below_gate(DispatchKeySet keys) {
  return keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, kGateKey);
}

void run_below(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  std::optional<c10::impl::ExcludeDispatchKeyGuard> excluded;
  if (std::string_view(op.schema().name()).starts_with("aten::")) excluded.emplace(kGateKey);
  op.redispatchBoxed(below_gate(keys), stack);
}

void gate(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  GateCall call(op, *stack);
  if (call.substitute_entries()) return op.callBoxed(stack);
  TouchedGroups groups;
  WrittenMembers written;
  call.collect(groups, written);
  groups.fill();
  try {
    run_below(op, keys, stack);
  } catch (...) {
    written.check_shapes(op);  // what resized a parameter says so, by name
    throw;
  }
  written.check_shapes(op);
}

// For operators that only alias: printing a shape through a view is not a collective.
void view_gate(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  GateCall call(op, *stack);
  if (call.substitute_entries()) return op.callBoxed(stack);
  call.synchronize_metadata();
  run_below(op, keys, stack);
}

// set_(), resize_(), set_data() and copy-on-write clones would part a parameter from its
// sharded storage without a trace.
void refuse_new_storage(const c10::OperatorHandle& op, DispatchKeySet keys,
                        torch::jit::Stack* stack) {
  GateCall(op, *stack).for_each_tensor([&op](IValue& value, bool) {
    const auto& tensor = value.toTensor();
    if (!meets_gate(tensor)) return;
    auto* storage = OnDemandStorage::of(tensor.unsafeGetTensorImpl());
    TORCH_CHECK_VALUE(storage == nullptr, op.schema().name(), " on parameter '",
                      storage->group().parameter_name(storage->index()),
                      "': a sharded parameter's storage can not be replaced, resized or shared "
                      "copy-on-write; use copy_() "
                      "or clone()");
  });
  run_below(op, keys, stack);
}

constexpr const char* kViewOperators[] = {"t",
                                          "transpose.int",
                                          "view",
                                          "view.dtype",
                                          "expand",
                                          "expand_as",
                                          "slice.Tensor",
                                          "select.int",
                                          "as_strided",
                                          "permute",
                                          "unsqueeze",
                                          "squeeze",
                                          "squeeze.dim",
                                          "_unsafe_view",
                                          "_reshape_alias",
                                          "split.Tensor",
                                          "split_with_sizes",
                                          "unbind.int",
                                          "unfold",
                                          "diagonal",
                                          "view_as",
                                          "view_as_real",
                                          "view_as_complex",
                                          "_conj",
                                          "_neg_view",
                                          "narrow",
                                          "chunk",
                                          "numpy_T",
                                          "movedim.int",
                                          "unflatten.int",
                                          "mT",
                                          "squeeze.dims"};

constexpr const char* kIgnoredOperators[] = {
    "detach",         "alias",    "size.int",  "sym_size.int", "stride.int",        "is_leaf",
    "requires_grad_", "_version", "output_nr", "retain_grad",  "is_floating_point", "is_complex",
    "is_same_size",   "is_conj",  "is_neg"};

constexpr const char* kStorageOperators[] = {
    "set_",    "set_.source_Tensor", "set_.source_Storage", "set_.source_Storage_storage_offset",
    "resize_", "resize_as_",         "_lazy_clone",         "set_.source_Tensor_storage_offset"};

c10::OperatorName aten_name(std::string_view name) {
  const auto dot = name.find('.');
  return {"aten::" + std::string(name.substr(0, dot)),
          dot == std::string_view::npos ? std::string() : std::string(name.substr(dot + 1))};
}

}  // namespace

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
  for (const auto* name : kViewOperators)
    add(name, c10::KernelFunction::makeFromBoxedFunction<&view_gate>());
  for (const auto* name : kIgnoredOperators) add(name, c10::KernelFunction::makeFallthrough());
  for (const auto* name : kStorageOperators) {
    add(name, c10::KernelFunction::makeFromBoxedFunction<&refuse_new_storage>());
  }
  handles.push_back(dispatcher.registerFallback(
      kGateKey, c10::KernelFunction::makeFromBoxedFunction<&gate>(), "fsdp"));
}

}  // namespace fsdp::internal
