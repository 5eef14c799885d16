// How long a piece of a test takes.
#pragma once

#include <chrono>
#include <functional>

namespace fsdp::testing {

inline double seconds_of(const std::function<void()>& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace fsdp::testing
