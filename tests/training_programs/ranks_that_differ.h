// Programs whose ranks do not all do the same. What they learn of each other is the same
// on the CPU, where collectives are announced, and on devices, whose hosts exchange words
// (fully_shard/host_exchange.h).
#pragma once

#include "tests/training_programs/program_rank.h"

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace fsdp::testing {

struct ProgramOfRanks {
  std::string name;
  int64_t ranks;
  TrainingProgram program;
};
void PrintTo(const ProgramOfRanks& program, std::ostream* out);

// Gradients that not all ranks have, or that come late on some. Each keeps the gradients,
// of undefined ones a tensor without elements.
std::vector<ProgramOfRanks> gradients_that_differ();

// Mistakes, of which every rank is told by an error. Each keeps whether the error says
// what the program expects, and prints what it says instead.
std::vector<ProgramOfRanks> mistakes_of_ranks();

}  // namespace fsdp::testing
