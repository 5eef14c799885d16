// What a random program does with its model.
#pragma once

#include "tests/fully_shard/random_programs/draw_model.h"
#include "tests/fully_shard/random_programs/random_program.h"
#include "tests/support/draws.h"

namespace fsdp::testing {

void draw_actions(Draws& draws, const ModelSize& size, Program& program);

}  // namespace fsdp::testing
