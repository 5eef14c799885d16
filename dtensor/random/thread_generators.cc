#include "dtensor/random/thread_generators.h"

#include "device_mesh/internal/device_types.h"
#include "dtensor/random/generator_dispatch.h"

#include <ATen/Context.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

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

}  // namespace fsdp::internal
