#include "on_demand/deferred/replay.h"

#include "on_demand/deferred/deferred_storage.h"
#include "on_demand/deferred/scratch_bytes.h"
#include "on_demand/gate_key.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/List.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>

namespace fsdp::internal {
namespace {

std::optional<size_t> generator_argument(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "generator") return i;
  }
  return std::nullopt;
}

// The overload of an operator that draws from the default generator that takes one.
std::optional<c10::OperatorHandle> with_generator(const c10::OperatorHandle& op) {
  const auto& overload = op.schema().overload_name();
  const auto taking = overload.empty() ? std::string("generator") : overload + "_generator";
  auto found = c10::Dispatcher::singleton().findSchema({op.schema().name(), taking});
  const bool fits =
      found && found->schema().arguments().size() == op.schema().arguments().size() + 1;
  return fits ? found : std::nullopt;
}

// The default generator is in `state` while this lives.
class DefaultGeneratorState {
 public:
  explicit DefaultGeneratorState(const at::Tensor& state)
      : generator_(at::detail::getDefaultCPUGenerator()), before_(state_of(generator_)) {
    set(state);
  }
  ~DefaultGeneratorState() { set(before_); }
  DefaultGeneratorState(const DefaultGeneratorState&) = delete;

 private:
  void set(const at::Tensor& state) {
    const std::scoped_lock lock(generator_.mutex());
    generator_.set_state(state);
  }

  at::Generator generator_;
  at::Tensor before_;
};

}  // namespace

bool leaves_uninitialised(const c10::OperatorHandle& op) {
  static constexpr std::array<std::string_view, 5> kNames = {"aten::empty", "aten::empty_strided",
                                                             "aten::empty_like", "aten::new_empty",
                                                             "aten::new_empty_strided"};
  return std::find(kNames.begin(), kNames.end(), op.schema().name()) != kNames.end();
}

bool draws(const c10::OperatorHandle& op) { return op.hasTag(at::Tag::nondeterministic_seeded); }

at::Generator generator_of(const c10::OperatorHandle& op, const std::vector<Argument>& arguments) {
  const auto place = generator_argument(op);
  if (place) {
    const auto& given = std::get<c10::IValue>(arguments[*place]);
    if (given.isGenerator()) return given.toGenerator();
  }
  return at::detail::getDefaultCPUGenerator();
}

at::Tensor state_of(at::Generator generator) {
  const std::scoped_lock lock(generator.mutex());
  return generator.get_state();
}

Replay::Replay(const Tape& tape) : past_the_gate_(kGateKey), tape_(tape) {}

void Replay::compute(const std::vector<int64_t>& values, int64_t before) {
  for (const auto step : tape_.dependencies().needed_for(values, before))
    run_again(tape_.step(step));
}

void Replay::allocate(int64_t value) {
  if (storages_.contains(value)) return;
  storages_.emplace(value, scratch_bytes(tape_.nbytes(value)).storage());
}

at::Tensor Replay::tensor(const DeferredTensor& deferred) const {
  const auto empty = at::empty({0}, at::TensorOptions().dtype(deferred.dtype));
  return empty.set_(storages_.at(deferred.value), deferred.offset, deferred.sizes,
                    deferred.strides);
}

// A generator of its own where the operator takes one: other threads may draw from the
// default one meanwhile.
void Replay::run_again(const Step& step) {
  if (leaves_uninitialised(step.op)) return open(step);
  if (!step.generator_state.defined()) return run(step);
  auto again = step;
  auto place = generator_argument(step.op);
  if (!place) {
    const auto taking = with_generator(step.op);
    if (taking) {
      place = generator_argument(*taking);
      again.op = *taking;
      again.arguments.insert(again.arguments.begin() + static_cast<std::ptrdiff_t>(*place),
                             c10::IValue());
    }
  }
  if (!place) {
    const DefaultGeneratorState as_recorded(step.generator_state);
    return run(step);
  }
  auto generator = at::detail::createCPUGenerator();
  generator.set_state(step.generator_state);
  again.arguments[*place] = c10::IValue(std::move(generator));
  run(again);
}

void Replay::open(const Step& step) {
  if (!step.results.front()) return;
  const auto value = step.results.front()->value;
  allocate(value);
  if (!step.raw.defined()) return;
  std::memcpy(storages_.at(value).mutable_data(), step.raw.const_data_ptr(),
              static_cast<size_t>(step.raw.numel()));
}

void Replay::run(const Step& step) {
  auto stack = arguments(step);
  step.op.callBoxed(&stack);
  keep_results(step, stack);
}

torch::jit::Stack Replay::arguments(const Step& step) const {
  torch::jit::Stack stack;
  for (const auto& given : step.arguments) {
    if (const auto* const list = std::get_if<ArgumentList>(&given)) {
      c10::impl::GenericList tensors(list->element_type);
      for (const auto& element : list->elements) tensors.push_back(argument(element));
      stack.emplace_back(std::move(tensors));
    } else if (const auto* const deferred = std::get_if<DeferredTensor>(&given)) {
      stack.emplace_back(tensor(*deferred));
    } else {
      stack.push_back(std::get<c10::IValue>(given));
    }
  }
  return stack;
}

c10::IValue Replay::argument(const OneArgument& argument) const {
  const auto* const deferred = std::get_if<DeferredTensor>(&argument);
  return deferred ? c10::IValue(tensor(*deferred)) : std::get<c10::IValue>(argument);
}

void Replay::keep_results(const Step& step, const torch::jit::Stack& stack) {
  size_t index = 0;
  for_each_result(stack, [&](const at::Tensor& result) {
    if (index < step.results.size() && step.results[index]) keep(*step.results[index], result);
    ++index;
  });
}

// As it was recorded, even where kernels of the meta device lay results out otherwise.
void Replay::keep(const DeferredTensor& deferred, const at::Tensor& result) {
  auto kept = result;
  if (result.strides() != deferred.strides || result.storage_offset() != deferred.offset) {
    kept = at::empty_strided(deferred.sizes, deferred.strides, result.options());
    kept.copy_(result);
  }
  storages_.insert_or_assign(deferred.value, kept.storage());
}

std::vector<at::Tensor> computed(const std::vector<at::Tensor>& deferred) {
  std::vector<at::Tensor> tensors;
  if (deferred.empty()) return tensors;
  const auto& tape = *DeferredStorage::of(deferred.front())->tape();
  std::vector<int64_t> values;
  for (const auto& tensor : deferred) values.push_back(DeferredStorage::of(tensor)->value());
  Replay replay(tape);
  replay.compute(values, tape.size());
  for (const auto& tensor : deferred) tensors.push_back(replay.tensor(deferred_tensor(tensor)));
  return tensors;
}

at::Tensor computed(const at::Tensor& deferred) { return computed(std::vector{deferred}).front(); }

}  // namespace fsdp::internal
