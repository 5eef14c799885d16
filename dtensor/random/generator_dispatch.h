// How random operators come to the generators of their thread (thread_generators.h): a
// dispatch key above all others, which a thread includes while it has some. Operators
// that may be given a generator, and were given none, are given the thread's. What takes
// none calls such operators, but for kernels of devices, which find the default generator
// in the state of the thread's.
#pragma once

#include "dtensor/tensor/dtensor_key.h"

#include <c10/core/DispatchKey.h>

namespace fsdp::internal {

// DTensors carry it, too: a thread without generators of its own passes.
inline constexpr c10::DispatchKey kGeneratorKey = kFirstKey;

// Registers the kernels under the key, where all other operators fall through.
// Idempotent, thread-safe.
void install_generator_kernels();

}  // namespace fsdp::internal
