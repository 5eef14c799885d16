#include "dtensor/kernels/dispatch.h"

#include "dtensor/dispatch/implicit_replication.h"
#include "dtensor/dispatch/run_by_strategy.h"
#include "dtensor/dispatch/scalar_arguments.h"
#include "dtensor/dispatch/tensor_arguments.h"
#include "dtensor/dtensor.h"
#include "dtensor/ops/op_table.h"
#include "dtensor/random/thread_generators.h"
#include "dtensor/redistribute/comm_listener.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace fsdp::internal {
namespace {

template <class Tell>
void tell_of(const c10::IValue& argument, const Tell& tell) {
  if (argument.isTensor()) {
    tell(argument.toTensor());
  } else if (argument.isTensorList() || argument.isOptionalTensorList()) {
    for (const c10::IValue& element : argument.toListRef()) {
      if (element.isTensor()) tell(element.toTensor());
    }
  }
}

using Written = c10::SmallVector<at::Tensor, 1>;

// Of what the operator writes, and of what it reads. Returns what is to be told once
// more, after it was written.
Written tell_owners(const OperatorCall& call) {
  Written to_be_told;
  const auto tell_of_write = [&to_be_told](const at::Tensor& tensor) {
    tell_write(tensor);
    const auto* const meta = find_meta(tensor);
    if (meta != nullptr && meta->owner && meta->owner->hears_end_of_write())
      to_be_told.push_back(tensor);
  };
  size_t next_written = 0;
  for (size_t i = 0; i < call.argument_count(); ++i) {
    const auto& written = call.traits().written;
    const bool writes = next_written < written.size() && written[next_written] == i;
    if (writes) {
      ++next_written;
      tell_of(call.argument(i), tell_of_write);
    } else {
      tell_of(call.argument(i), tell_read);
    }
  }
  return to_be_told;
}

Written set_written_from_parameter(const TensorArguments& arguments) {
  Written written;
  arguments.for_each([&written](const at::Tensor& tensor, bool writes) {
    if (!writes || !is_dtensor(tensor)) return;
    set_from_parameter(tensor);
    written.push_back(tensor);
  });
  return written;
}

// A parameter, and the plain tensor that is put in the place of its values; undefined
// where they are not those of one.
struct Overwritten {
  at::Tensor parameter, source;
};
using OverwrittenParameters = c10::SmallVector<Overwritten, 1>;

at::Tensor plain_tensor(const c10::IValue& value) {
  const bool is_plain = value.isTensor() && !is_dtensor(value.toTensor());
  return is_plain ? value.toTensor() : at::Tensor();
}

// REQUIRES: the operator overwrites its first argument.
OverwrittenParameters overwritten_parameters(const TensorArguments& arguments) {
  OverwrittenParameters overwritten;
  const auto look = [&overwritten](const c10::IValue& written, const c10::IValue& source) {
    const auto* const meta = written.isTensor() ? find_meta(written.toTensor()) : nullptr;
    if (meta != nullptr && meta->is_of_parameter())
      overwritten.push_back({written.toTensor(), plain_tensor(source)});
  };
  const c10::IValue source = arguments.size() < 2 ? c10::IValue() : arguments[1];
  if (!TensorArguments::is_list(arguments[0])) {
    look(arguments[0], source);
    return overwritten;
  }
  const bool one_each = TensorArguments::is_list(source);
  const auto written = arguments[0].toListRef();
  for (size_t i = 0; i < written.size(); ++i)
    look(written[i], one_each && i < source.toListRef().size() ? source.toListRef()[i] : source);
  return overwritten;
}

// Runs `body` below autograd once the owners know; the operator itself where it computes
// with whole values.
template <class Body>
void run_told(const OperatorTraits& traits, const c10::OperatorHandle& op, c10::DispatchKeySet keys,
              torch::jit::Stack* stack, const Body& body) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const CommOperatorScope moving(op.schema().name());
  OperatorCall call(op, traits, keys, stack);
  TensorArguments arguments(op, *stack);
  const TensorsMet met(arguments);
  if (met.is_mixed() && needs_whole_values(arguments)) {
    make_whole(arguments, gathered_value);
    return call.run_in_place();
  }
  Written written;
  if (met.from_parameter && !traits.written.empty()) {
    if (met.plain) check_written_alike(call, arguments);
    written = set_written_from_parameter(arguments);
  }
  OverwrittenParameters overwritten;
  if (met.from_parameter && traits.overwrites) overwritten = overwritten_parameters(arguments);
  // A parameter keeps no numbers, and what is copied into it is hashed after_overwrite().
  const bool are_kept = overwritten.empty() || !overwritten.front().source.defined() ||
                        TensorArguments::is_list(arguments[0]);
  const ScalarHash scalars =
      met.from_parameter && are_kept ? scalar_hash_of(traits, arguments) : ScalarHash();
  const Written to_be_told = tell_owners(call);
  const NewFromParameter origin(met.from_parameter, scalars);
  body(call);
  for (const at::Tensor& dtensor : written) set_scalar_hash(dtensor, scalars);
  for (const auto& [parameter, source] : overwritten)
    owner_of(parameter)->after_overwrite(parameter, source);
  for (const at::Tensor& dtensor : to_be_told) tell_written(dtensor);
}

// For operators without an entry.
void run_without_strategy(OperatorCall& call) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !call.traits().draws_random_numbers, "No sharding rule for ", call.description(),
      ", which draws random numbers. Work on the whole value with fsdp::DTensor(t).full_tensor() "
      "or .redistribute({Replicate()}) (both collective), or on this rank's part with "
      ".to_local(), and wrap the result with fsdp::from_local or fsdp::distribute_tensor.");
  run_on_whole(call);
}

// Of an operator with an entry in the table.
class TableKernel final : public c10::OperatorKernel {
 public:
  TableKernel(const OpEntry& entry, const c10::OperatorHandle& op)
      : handler_(entry.handler), traits_(op) {
    traits_.overwrites = entry.overwrites && !traits_.written.empty();
    if (entry.strategy.any()) by_strategy_.emplace(entry.strategy, op, entry.local_kernel);
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    run_told(traits_, op, keys, stack, [this](OperatorCall& call) {
      if (handler_ == nullptr) return by_strategy_->run(call);
      handler_(call, by_strategy_ ? &*by_strategy_ : nullptr);
    });
  }

 private:
  OpHandler handler_;
  std::optional<StrategyKernel> by_strategy_;
  OperatorTraits traits_;
};

// Of an operator without one.
class WholeKernel final : public c10::OperatorKernel {
 public:
  explicit WholeKernel(const c10::OperatorHandle& op) : traits_(op) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    run_told(traits_, op, keys, stack, run_without_strategy);
  }

 private:
  OperatorTraits traits_;
};

// Operators that only a composite kernel implements reach the DTensor key where autograd,
// which would have taken them apart, is switched off; operators registered later have no
// kernel of ours.
void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const bool composite = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  run_told(OperatorTraits(op), op, keys, stack, [composite](OperatorCall& call) {
    composite ? call.decompose() : run_without_strategy(call);
  });
}

// "add.Tensor", as the table has it; empty for operators that are not LibTorch's.
std::string name_in_table(const c10::OperatorName& name) {
  constexpr std::string_view kLibTorch = "aten::";
  if (!name.name.starts_with(kLibTorch)) return {};
  return name.name.substr(kLibTorch.size()) + "." + name.overload_name;
}

void register_operators(KernelHandles& handles) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op_table().is_unboxed(name_in_table(name))) continue;
    auto kernel = kernel_of(*op);
    if (!kernel.has_value()) continue;
    handles.push_back(dispatcher.registerImpl(name, kDTensorKey, std::move(*kernel), std::nullopt,
                                              nullptr, "fsdp DTensor"));
  }
}

}  // namespace

std::optional<c10::KernelFunction> kernel_of(const c10::OperatorHandle& op) {
  using c10::KernelFunction;
  const auto* const entry = op_table().find(name_in_table(op.operator_name()));
  if (entry != nullptr)
    return KernelFunction::makeFromBoxedFunctor(std::make_unique<TableKernel>(*entry, op));
  const bool composite = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  if (composite) return std::nullopt;
  return KernelFunction::makeFromBoxedFunctor(std::make_unique<WholeKernel>(op));
}

void install_dtensor_kernels() {
  // Never destroyed: tensors may outlive static destruction, and the dispatcher may be
  // gone by then.
  static const auto* const installed = [] {
    auto* const handles = new KernelHandles;
    install_generator_kernels();
    register_operators(*handles);
    register_fast_pointwise(*handles);
    register_view_replay(*handles);
    register_composites(*handles);
    handles->push_back(c10::Dispatcher::singleton().registerFallback(
        kDTensorKey, c10::KernelFunction::makeFromBoxedFunction<&fallback>(), "fsdp DTensor"));
    return handles;
  }();
  static_cast<void>(installed);
}

}  // namespace fsdp::internal
