// LibTorch's default generator, which ranks that are threads share: who draws from it, or
// sets its seed, locks this meanwhile.
#pragma once

#include <mutex>

namespace fsdp::testing {

inline std::mutex default_generator_in_use;

}  // namespace fsdp::testing
