// The generators that a thread's random operators draw from instead of LibTorch's default
// ones.
//
// Operators come to them by a dispatch key above all others, which a thread includes
// while it has some. Operators that may be given a generator, and were given none, are
// given the thread's. What takes none calls such operators, but for kernels of devices,
// which find the default generator in the state of the thread's.
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

// For operators that draw from a device's default generator and take no other. While it
// lives, the default generator of the device is in the state of `generator`, which goes
// on from there; then it is as before. No other thread may use it meanwhile.
class DefaultGeneratorAs {
 public:
  explicit DefaultGeneratorAs(at::Generator generator);
  ~DefaultGeneratorAs();
  DefaultGeneratorAs(const DefaultGeneratorAs&) = delete;
  DefaultGeneratorAs& operator=(const DefaultGeneratorAs&) = delete;

 private:
  at::Generator generator_, default_;
  at::Tensor before_;
};

// Registers the kernels by which operators come to their thread's generators, under a key
// where all other operators fall through. Idempotent, thread-safe.
void install_generator_kernels();

}  // namespace fsdp::internal
