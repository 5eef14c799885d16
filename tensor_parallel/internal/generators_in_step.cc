#include "tensor_parallel/internal/generators_in_step.h"

#include "device_mesh/on_mesh/mesh_collectives.h"
#include "dtensor/random/thread_generators.h"

#include <ATen/Context.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>

#include <cstdint>
#include <random>
#include <vector>

namespace fsdp::internal {
namespace {

int64_t number_of_this_process() {
  static const int64_t number = [] {
    std::random_device random;
    return static_cast<int64_t>(random()) << 32 | random();
  }();
  return number;
}

// Which generator it is: ranks that are threads of one process share one per device.
at::Tensor identity_of(c10::Device device) {
  const std::vector<int64_t> words = {number_of_this_process(), device.index()};
  return at::tensor(words, c10::kLong).view(c10::kByte);
}

at::Tensor from_first(const at::Tensor& own, const DeviceMesh& mesh) {
  const at::Tensor bytes = own.to(local_device(mesh), own.scalar_type(), false, /*copy=*/true);
  collectives_of(mesh, 0).broadcast(
      {.tensor = bytes, .what = "random state of parallelize_module"});
  return bytes.cpu();
}

}  // namespace

void bring_generators_in_step(const DeviceMesh& mesh) {
  if (mesh.size() == 1) return;
  const c10::Device device = local_device(mesh);
  const at::Generator generator = at::globalContext().defaultGenerator(device);
  const at::Tensor identity = identity_of(device);
  const int64_t length = identity.numel();
  const at::Tensor first = from_first(at::cat({identity, generator_state(generator)}), mesh);
  if (first.narrow(0, 0, length).equal(identity)) return;
  set_generator_state(generator, first.narrow(0, length, first.numel() - length).clone());
}

}  // namespace fsdp::internal
