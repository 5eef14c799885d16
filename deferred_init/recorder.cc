#include "deferred_init/recorder.h"

#include "deferred_init/deferred_storage.h"
#include "deferred_init/replay.h"
#include "dtensor/random/thread_generators.h"
#include "on_demand/gate_key.h"

#include <ATen/core/List.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <string_view>
#include <utility>

namespace fsdp::internal {
namespace {

// Until then no tensor is deferred, and boxed operators look at one flag.
std::atomic<bool> is_enabled{false};

bool is_list(const c10::IValue& value) {
  return value.isTensorList() || value.isOptionalTensorList();
}

struct TensorsAmong {
  bool any = false;
  std::shared_ptr<Tape> tape;  // of a deferred one; null for none
};

TensorsAmong tensors_among(const c10::OperatorHandle& op, const c10::IValue* first) {
  TensorsAmong found;
  const auto look = [&](const c10::IValue& value) {
    if (!value.isTensor() || !value.toTensor().defined()) return;
    found.any = true;
    auto* const storage = DeferredStorage::of(value.toTensor());
    if (storage == nullptr) return;
    TORCH_CHECK_VALUE(!found.tape || found.tape == storage->tape(),
                      "deferred_init: ", op.operator_name(),
                      " takes tensors of two threads; build and initialise a model on one");
    found.tape = storage->tape();
  };
  for (size_t i = 0; i < op.schema().arguments().size(); ++i) {
    if (is_list(first[i])) {
      for (const auto& element : first[i].toListRef()) look(element);
    } else {
      look(first[i]);
    }
  }
  return found;
}

void check_needs_no_values(const c10::OperatorHandle& op) {
  static constexpr std::array<std::string_view, 5> kReaders = {
      "aten::item", "aten::is_nonzero", "aten::allclose", "aten::one_hot", "aten::to_dense"};
  const bool reads =
      op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape) ||
      std::find(kReaders.begin(), kReaders.end(), op.schema().name()) != kReaders.end();
  TORCH_CHECK_VALUE(!reads, "deferred_init: what ", op.operator_name(),
                    " gives depends on the values of a tensor that has none yet. Compute it from "
                    "numbers instead, or build this module at once, outside of deferred_init");
}

void check_device(const c10::OperatorHandle& op, c10::Device device) {
  TORCH_CHECK_VALUE(device.is_cpu() || device.is_meta(), "deferred_init: ", op.operator_name(),
                    " makes a tensor on ", device,
                    "; a model is built on the CPU, and fsdp::materialize puts its shards on the "
                    "mesh's device");
}

// at::tensor(values) writes its memory itself. Few parameters are as small.
at::Tensor raw_memory(size_t nbytes) {
  constexpr size_t kMost = 4096;
  if (nbytes == 0 || nbytes > kMost) return {};
  const c10::impl::ExcludeDispatchKeyGuard excluded(kGateKey);
  return at::zeros({static_cast<int64_t>(nbytes)}, at::TensorOptions().dtype(at::kByte));
}

using StoragePtr = c10::intrusive_ptr<DeferredStorage>;

class OperatorOnMeta {
 public:
  explicit OperatorOnMeta(const std::vector<StoragePtr>& storages) : storages_(storages) {
    for (const auto& storage : storages_) storage->begin_operator();
  }
  ~OperatorOnMeta() {
    for (const auto& storage : storages_) storage->end_operator();
  }
  OperatorOnMeta(const OperatorOnMeta&) = delete;

 private:
  const std::vector<StoragePtr>& storages_;
};

// One operator on its way onto the tape.
class Recording {
 public:
  Recording(const c10::OperatorHandle& op, std::shared_ptr<Tape> tape, c10::IValue* first)
      : tape_(std::move(tape)), step_{.op = op, .arguments = {}} {
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* const alias = arguments[i].alias_info();
      writes_now_ = alias != nullptr && alias->isWrite();
      take(first[i], arguments[i].name());
    }
  }

  void run_on_meta(c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const c10::impl::ExcludeDispatchKeyGuard excluded(kGateKey);
    const OperatorOnMeta running(storages_);
    try {
      step_.op.redispatchBoxed(below_gate(keys), stack);
    } catch (const c10::NotImplementedError&) {
      TORCH_CHECK_VALUE(false, "deferred_init: ", step_.op.operator_name(),
                        " can not run without values (it has no kernel for the meta device). "
                        "Build this module at once, outside of deferred_init");
    }
  }

  // REQUIRES: run_on_meta() went well.
  void draw() {
    if (!draws(step_.op)) return;
    step_.generator_state = generator_state(generator_of(step_.op, step_.arguments));
    Replay scratch(*tape_);
    scratch.compute(only_read(), tape_->size());
    for (const auto value : writes_) scratch.allocate(value);
    scratch.run(step_);
  }

  void finish(torch::jit::Stack* stack) {
    for_each_result(torch::jit::last(*stack, step_.op.schema().returns().size()),
                    [this](const at::Tensor& result) { keep(result); });
    tape_->add(std::move(step_), std::move(reads_), writes_);
  }

 private:
  // Puts what the meta device can run with in the place of `value`.
  void take(c10::IValue& value, const std::string& name) {
    if (value.isTensor()) {
      auto argument = recorded(value);
      std::visit([this](auto& each) { step_.arguments.emplace_back(std::move(each)); }, argument);
    } else if (is_list(value)) {
      take_list(value);
    } else {
      step_.arguments.emplace_back(value);
      if (value.isDevice()) check_device(step_.op, value.toDevice());
      if (name == "pin_memory") value = c10::IValue();
      if (name == "device") value = c10::Device(c10::kMeta);
    }
  }

  void take_list(c10::IValue& value) {
    ArgumentList list{value.toList().elementType(), {}};
    auto on_meta = value.toList().copy();
    for (size_t i = 0; i < on_meta.size(); ++i) {
      c10::IValue element = on_meta.get(i);
      if (!element.isTensor()) {
        list.elements.emplace_back(element);
        continue;
      }
      list.elements.push_back(recorded(element));
      on_meta.set(i, element);
    }
    step_.arguments.emplace_back(std::move(list));
    value = on_meta;
  }

  OneArgument recorded(c10::IValue& value) {
    const at::Tensor tensor = value.toTensor();
    if (!tensor.defined()) return value;
    if (auto* const storage = DeferredStorage::of(tensor)) {
      storages_.push_back(StoragePtr::reclaim_copy(storage));
      reads_.push_back(storage->value());
      if (writes_now_) {
        writes_.push_back(storage->value());
        storage->forbid_raw_access();
      }
      return deferred_tensor(tensor);
    }
    TORCH_CHECK_VALUE(!writes_now_, "deferred_init: ", step_.op.operator_name(),
                      " would write what has no values yet to a tensor that exists already, of "
                      "shape ",
                      tensor.sizes());
    // Numbers that became tensors are told apart by a flag.
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return value;
    value =
        at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
    return c10::IValue(tensor.detach().clone());  // as it is now
  }

  std::vector<int64_t> only_read() const {
    std::vector<int64_t> values;
    for (const auto value : reads_) {
      if (std::find(writes_.begin(), writes_.end(), value) == writes_.end())
        values.push_back(value);
    }
    return values;
  }

  void keep(const at::Tensor& result) {
    const bool is_new = result.defined() && DeferredStorage::of(result) == nullptr;
    if (!is_new) {
      step_.results.emplace_back(std::nullopt);
      return;
    }
    if (leaves_uninitialised(step_.op)) step_.raw = raw_memory(result.storage().nbytes());
    step_.results.emplace_back(defer(result, tape_, step_.raw));
    writes_.push_back(step_.results.back()->value);
  }

  std::shared_ptr<Tape> tape_;
  Step step_;
  std::vector<StoragePtr> storages_;
  std::vector<int64_t> reads_, writes_;
  bool writes_now_ = false;  // the argument that is being taken is written
};

// An operator that makes a tensor of nothing, on the CPU; the user may ask for the meta
// device, and gets an ordinary tensor there.
bool makes_a_tensor(const c10::OperatorHandle& op, const c10::IValue* first) {
  const auto& schema = op.schema();
  if (schema.returns().size() != 1 ||
      schema.returns().front().type()->kind() != c10::TypeKind::TensorType)
    return false;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    if (schema.arguments()[i].name() != "device" || !first[i].isDevice()) continue;
    if (first[i].toDevice().is_meta()) return false;
  }
  return true;
}

}  // namespace

void enable_recording() { is_enabled = true; }

bool record_if_deferred(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                        torch::jit::Stack* stack) {
  if (!is_enabled.load(std::memory_order_relaxed)) return false;
  auto* const first = &*stack->end() - op.schema().arguments().size();
  auto [any, tape] = tensors_among(op, first);
  if (!tape) {
    if (any || !c10::impl::tls_is_dispatch_key_included(kGateKey)) return false;
    if (!makes_a_tensor(op, first)) return false;
    tape = Tape::current();
  }
  check_needs_no_values(op);
  Recording recording(op, std::move(tape), first);
  recording.run_on_meta(keys, stack);
  recording.draw();
  recording.finish(stack);
  return true;
}

}  // namespace fsdp::internal
