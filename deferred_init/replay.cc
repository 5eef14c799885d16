#include "deferred_init/replay.h"

#include "deferred_init/deferred_storage.h"
#include "dtensor/random/thread_generators.h"
#include "on_demand/gate_key.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

namespace fsdp::internal {
namespace {

constexpr int64_t kOwnPages = int64_t{256} << 10;  // bytes

// Memory that is used for a moment, as large as a model's largest parameter: uint8
// [nbytes], not initialised. Large ones have pages of their own, which go back to
// the system with the tensor: malloc would keep a hole after each, too small by its
// alignment for the next, and a model computed parameter by parameter would be there in
// holes.
at::Tensor scratch_bytes(int64_t nbytes) {
  const auto options = at::TensorOptions().dtype(at::kByte);
  if (nbytes < kOwnPages) return at::empty({nbytes}, options);
  const auto length = static_cast<size_t>(nbytes);
  auto* const pages =
      mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(pages != MAP_FAILED, "deferred_init: can not allocate ", nbytes, " bytes");
  return at::from_blob(
      pages, {nbytes}, [length](void* data) { munmap(data, length); }, options);
}

std::optional<size_t> generator_argument(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "generator") return i;
  }
  return std::nullopt;
}

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
  return generator_of_thread(c10::kCPU);
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

void Replay::run_again(const Step& step) {
  if (leaves_uninitialised(step.op)) return open(step);
  if (step.generator_state.defined()) return draw_again(step);
  run(step);
}

// From a generator of its own: others may draw from the one it had meanwhile.
void Replay::draw_again(Step step) {
  const auto own = std::make_shared<ThreadGenerators>(/*seed=*/0, std::vector<int64_t>{});
  set_generator_state(own->on(c10::kCPU), step.generator_state);
  const UseThreadGenerators drawn_from(own);
  if (const auto place = generator_argument(step.op)) step.arguments[*place] = c10::IValue();
  run(step);
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
