// Runs many random programs on few worlds of thread ranks, and makes those that fail
// small.
#pragma once

#include "device_mesh/device_mesh.h"
#include "tests/fully_shard/random_programs/random_program.h"
#include "tests/support/mesh_in_memory.h"

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::testing {

struct ProgramWorlds {
  // Of the ranks that a program needs. Programs of one world, by what Program says of it,
  // share one.
  std::function<MeshInMemory(const Program&)> memory;
  // Runs a program on the rank that this thread is: the first difference, or nothing.
  // Collective.
  std::function<std::optional<std::string>(const Program&, const DeviceMesh&)> run;
};

// Fails the running test for each program that differs, with its seed and what became of
// it when it was shrunk.
void expect_no_difference(const std::vector<Program>& programs, const ProgramWorlds& worlds);

}  // namespace fsdp::testing
