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

// Whether the long sweeps run whole, as .ci/nightly asks for by FSDP_NIGHT=1. A landing
// runs a share of each.
inline bool is_night() { return number_from_environment("FSDP_NIGHT", 0) != 0; }

// How many random cases to run: as many as the variable `name` says, else `whole` at
// night and `share` before a landing.
inline uint64_t number_of_cases(const char* name, uint64_t share, uint64_t whole) {
  return number_from_environment(name, is_night() ? whole : share);
}

}  // namespace fsdp::testing
