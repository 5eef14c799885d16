// Runs a random program sharded and unsharded, side by side, and compares.
#pragma once

#include "device_mesh/device_mesh.h"
#include "tests/fully_shard/random_programs/random_program.h"
#include "tests/fully_shard/random_programs/sharded_program.h"

#include <cstdint>
#include <optional>
#include <string>

namespace fsdp::testing {

// Runs `program` on this rank of a world of `program.world` and returns the first
// difference, or nothing. The unsharded side is one plain model per rank, each with its
// own optimizer, whose gradients of sharded parameters are replaced by their sum over the
// ranks, divided. Losses and input gradients must be bit-equal; gradients too for up to
// two ranks, and within (world - 1) * eps * the sum of absolute values above. `prepare`
// makes the model tensor-parallel where the program is to be: all must then be equal but
// for rounding. Collective. An exception that the program does not plan leaves.
//
// REQUIRES: `mesh` is of the data; `rank` its.
std::optional<std::string> run_program(const Program& program, int64_t rank, const DeviceMesh& mesh,
                                       const Prepare& prepare = {});

}  // namespace fsdp::testing
