// How many, where that is for who runs the tests to say.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace fsdp::testing {

// The whole number that the variable `name` has, `otherwise` where there is none.
inline uint64_t number_from_environment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

}  // namespace fsdp::testing
