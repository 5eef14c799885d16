// LibTorch's default generator, which ranks that are threads share.
#pragma once

#include <ATen/Context.h>

#include <cstdint>
#include <mutex>

namespace fsdp::testing {

// Locked by who draws from it, or sets its seed.
inline std::mutex default_generator_in_use;

// What draw() gives from the generator seeded with `seed`. One thread at a time.
template <class Draw>
auto drawn_from_seed(uint64_t seed, const Draw& draw) {
  const std::scoped_lock lock(default_generator_in_use);
  at::manual_seed(seed);
  return draw();
}

}  // namespace fsdp::testing
