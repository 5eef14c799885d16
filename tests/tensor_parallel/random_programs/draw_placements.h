// Random programs, tensor-parallel: the generator's models and actions, with random
// parameters cut at random over tensor-parallel ranks, and no styles.
#pragma once

#include "tests/fully_shard/random_programs/random_program.h"

#include <cstdint>

namespace fsdp::testing {

// In double, so that only rounding differs. Some are not sharded.
Program generate_parallel(uint64_t seed);

}  // namespace fsdp::testing
