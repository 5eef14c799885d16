// Options of a random program that bend what its model and actions are.
#pragma once

#include "tests/fully_shard/random_programs/random_program.h"
#include "tests/support/draws.h"

namespace fsdp::testing {

// After all else, and each new one last: programs of known seeds keep what they had.
void draw_options(Draws& draws, Program& program);

}  // namespace fsdp::testing
