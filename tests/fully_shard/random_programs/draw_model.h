// The modules, parameters and units of a random program.
#pragma once

#include "tests/fully_shard/random_programs/random_program.h"
#include "tests/support/draws.h"

namespace fsdp::testing {

// Ids are below these.
struct ModelSize {
  int nodes = 0, params = 0;
};
ModelSize draw_model(Draws& draws, Program& program);

}  // namespace fsdp::testing
