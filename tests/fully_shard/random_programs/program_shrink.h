// Makes a failing program small.
#pragma once

#include "tests/fully_shard/random_programs/random_program.h"

#include <functional>

namespace fsdp::testing {

// Removes parts and options of `program` one at a time as long as `fails` holds, at most
// `trials` times.
Program shrink(Program program, const std::function<bool(const Program&)>& fails, int trials = 500);

}  // namespace fsdp::testing
