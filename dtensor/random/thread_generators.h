// The generators that a thread's random operators draw from instead of LibTorch's default
// ones. How operators come to them: generator_dispatch.h.
#pragma once

#include "device_mesh/device_mesh.h"

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace fsdp::internal {

// One per device, all seeded alike. Thread-safe.
class ThreadGenerators {
 public:
  // `ranks`: the global ranks that have such generators in the same states.
  ThreadGenerators(uint64_t seed, std::vector<int64_t> ranks);

  uint64_t seed() const { return seed_; }
  const std::vector<int64_t>& ranks() const { return ranks_; }  // ascending
  bool are_in_step_on(const DeviceMesh& mesh) const;
  // Made when first asked for. A device without index is the current one of its type.
  at::Generator on(c10::Device device);

 private:
  uint64_t seed_;
  std::vector<int64_t> ranks_;
  std::mutex mutex_;
  std::vector<at::Generator> made_;
};
using ThreadGeneratorsPtr = std::shared_ptr<ThreadGenerators>;

// Of the calling thread; null for LibTorch's default ones.
const ThreadGeneratorsPtr& thread_generators();
// Sets them and gives those before.
ThreadGeneratorsPtr exchange_thread_generators(ThreadGeneratorsPtr generators);
// What an operator on `device` draws from that is given none.
at::Generator generator_of_thread(c10::Device device);

// The calling thread draws from `generators` while this lives.
class UseThreadGenerators {
 public:
  explicit UseThreadGenerators(ThreadGeneratorsPtr generators)
      : before_(exchange_thread_generators(std::move(generators))) {}
  ~UseThreadGenerators() { exchange_thread_generators(std::move(before_)); }
  UseThreadGenerators(const UseThreadGenerators&) = delete;
  UseThreadGenerators& operator=(const UseThreadGenerators&) = delete;

 private:
  ThreadGeneratorsPtr before_;
};

// A copy, in host memory.
at::Tensor generator_state(at::Generator generator);
void set_generator_state(at::Generator generator, const at::Tensor& state);

}  // namespace fsdp::internal
