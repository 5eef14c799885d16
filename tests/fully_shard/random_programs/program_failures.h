// Programs that failed, told with what became of them when they were made small.
#pragma once

#include "tests/fully_shard/random_programs/random_program.h"

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {

using ProgramFailures = std::vector<std::pair<Program, std::string>>;

// Fails the running test for each one, with its seed. The first few are shrunk.
// `failure_of` runs a program and says how it fails, or nothing.
void tell_failures(const ProgramFailures& failures,
                   const std::function<std::string(const Program&)>& failure_of);

}  // namespace fsdp::testing
