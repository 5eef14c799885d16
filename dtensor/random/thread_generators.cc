#include "dtensor/random/thread_generators.h"

#include "device_mesh/internal/accelerator.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

// Of the kernels that give operators their generator. DTensors carry it, too: a thread
// without generators of its own passes.
constexpr c10::DispatchKey kGeneratorKey = kFirstKey;

ThreadGeneratorsPtr& current_generators() {
  thread_local ThreadGeneratorsPtr current;
  return current;
}

c10::Device with_index(c10::Device device) {
  return device.has_index() ? device : current_device(device.type());
}

at::Generator made_like_default(c10::Device device, uint64_t seed) {
  at::Generator model = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(model.mutex());
  at::Generator own = model.clone();
  own.set_current_seed(seed);
  return own;
}

bool is_optional_generator(const c10::Type& type) {
  return type.kind() == c10::TypeKind::OptionalType &&
         type.containedType(0)->kind() == c10::TypeKind::GeneratorType;
}

std::optional<size_t> generator_place(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  const auto found = std::find_if(arguments.begin(), arguments.end(), [](const auto& argument) {
    return is_optional_generator(*argument.type());
  });
  if (found == arguments.end()) return std::nullopt;
  return static_cast<size_t>(found - arguments.begin());
}

// Where an operator draws: on the device that it is asked for, else on that of its first
// tensor, else on the CPU.
c10::Device device_of(const c10::FunctionSchema& schema, const c10::IValue* first) {
  std::optional<c10::Device> of_tensor;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    if (first[i].isDevice()) return first[i].toDevice();
    if (!of_tensor.has_value() && first[i].isTensor() && first[i].toTensor().defined())
      of_tensor = first[i].toTensor().device();
  }
  return of_tensor.value_or(c10::Device(c10::kCPU));
}

c10::IValue* first_argument(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  return &*stack->end() - op.schema().arguments().size();
}

void run_below_generator_key(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                             torch::jit::Stack* stack) {
  op.redispatchBoxed(keys_below(kGeneratorKey, keys), stack);
}

class GivesGenerator final : public c10::OperatorKernel {
 public:
  explicit GivesGenerator(size_t place) : place_(place) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    auto* const first = first_argument(op, stack);
    if (thread_generators() && first[place_].isNone()) {
      const auto device = device_of(op.schema(), first);
      if (!device.is_meta()) first[place_] = thread_generators()->on(device);
    }
    run_below_generator_key(op, keys, stack);
  }

 private:
  size_t place_;
};

// On the CPU no such operator draws but by others.
void lend_generator(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                    torch::jit::Stack* stack) {
  const auto device = device_of(op.schema(), first_argument(op, stack));
  if (!thread_generators() || device.is_cpu() || device.is_meta())
    return run_below_generator_key(op, keys, stack);
  const DefaultGeneratorAs lent(thread_generators()->on(device));
  const c10::impl::ExcludeDispatchKeyGuard excluded(kGeneratorKey);
  run_below_generator_key(op, keys, stack);
}

// A kernel that draws on a device, rather than calling operators that do.
bool draws_by_itself(const c10::OperatorHandle& op) {
  static const auto& keys = *new auto(accelerator_keys(c10::DispatchKey::Dense));
  return op.hasTag(at::Tag::nondeterministic_seeded) &&
         std::any_of(keys.begin(), keys.end(),
                     [&](c10::DispatchKey key) { return op.hasKernelForDispatchKey(key); });
}

std::optional<c10::KernelFunction> generator_kernel_of(const c10::OperatorHandle& op) {
  using Kernel = c10::KernelFunction;
  if (const auto place = generator_place(op.schema()))
    return Kernel::makeFromBoxedFunctor(std::make_unique<GivesGenerator>(*place));
  if (draws_by_itself(op)) return Kernel::makeFromBoxedFunction<&lend_generator>();
  return std::nullopt;
}

using RegistrationHandles = std::vector<c10::RegistrationHandleRAII>;

void register_generator_kernels(RegistrationHandles& handles) {
  auto& dispatcher = c10::Dispatcher::singleton();
  handles.push_back(dispatcher.registerFallback(
      kGeneratorKey, c10::KernelFunction::makeFallthrough(), "fsdp generators"));
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema()) continue;
    auto kernel = generator_kernel_of(*op);
    if (!kernel.has_value()) continue;
    handles.push_back(dispatcher.registerImpl(name, kGeneratorKey, std::move(*kernel), std::nullopt,
                                              nullptr, "fsdp generators"));
  }
}

}  // namespace

ThreadGenerators::ThreadGenerators(uint64_t seed, std::vector<int64_t> ranks)
    : seed_(seed), ranks_(std::move(ranks)) {
  std::sort(ranks_.begin(), ranks_.end());
}

bool ThreadGenerators::are_in_step_on(const DeviceMesh& mesh) const {
  const auto& ranks = mesh.ranks();
  return std::all_of(ranks.begin(), ranks.end(), [this](int64_t rank) {
    return std::binary_search(ranks_.begin(), ranks_.end(), rank);
  });
}

at::Generator ThreadGenerators::on(c10::Device given) {
  const c10::Device device = with_index(given);
  const std::lock_guard lock(mutex_);
  const auto known = std::find_if(made_.begin(), made_.end(), [&](const at::Generator& generator) {
    return generator.device() == device;
  });
  return known != made_.end() ? *known : made_.emplace_back(made_like_default(device, seed_));
}

const ThreadGeneratorsPtr& thread_generators() { return current_generators(); }

ThreadGeneratorsPtr exchange_thread_generators(ThreadGeneratorsPtr generators) {
  install_generator_kernels();
  c10::impl::tls_set_dispatch_key_included(kGeneratorKey, generators != nullptr);
  return std::exchange(current_generators(), std::move(generators));
}

at::Generator generator_of_thread(c10::Device device) {
  const auto& own = thread_generators();
  return own ? own->on(device) : at::globalContext().defaultGenerator(with_index(device));
}

at::Tensor generator_state(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_generator_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

DefaultGeneratorAs::DefaultGeneratorAs(at::Generator generator)
    : generator_(std::move(generator)),
      default_(at::globalContext().defaultGenerator(generator_.device())),
      before_(generator_state(default_)) {
  set_generator_state(default_, generator_state(generator_));
}

DefaultGeneratorAs::~DefaultGeneratorAs() {
  set_generator_state(generator_, generator_state(default_));
  set_generator_state(default_, before_);
}

void install_generator_kernels() {
  // Never destroyed: kernels stay for the life of the process.
  static const auto* const installed = [] {
    auto* const handles = new RegistrationHandles;
    register_generator_kernels(*handles);
    return handles;
  }();
  static_cast<void>(installed);
}

}  // namespace fsdp::internal
