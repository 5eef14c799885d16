// How random operators come to the generators of their thread (thread_generators.h): a
// dispatch key above all others, which a thread includes while it has some. Operators
// that may be given a generator, and were given none, are given the thread's. What takes
// none calls such operators, but for kernels of devices, which find the default generator
// in the state of the thread's.
#pragma once

#include <c10/core/DispatchKey.h>

namespace fsdp::internal {

// LibTorch registers nothing for it.
inline constexpr c10::DispatchKey kGeneratorKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

// Registers the kernels under the key. Idempotent, thread-safe.
void install_generator_kernels();

}  // namespace fsdp::internal
