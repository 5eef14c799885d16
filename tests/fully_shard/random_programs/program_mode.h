// How much every touch does while a program runs: all it can, where the program empties
// every group after every operator, and else as little.
#pragma once

#include "on_demand/on_demand_storage.h"
#include "tests/fully_shard/random_programs/random_program.h"
#include "tests/support/write_checks.h"

namespace fsdp::testing {

// Process-wide: one at a time, outside the ranks' threads.
class ProgramMode {
 public:
  explicit ProgramMode(const Program& program) : checks_(program.evict) {
    internal::set_evict_after_every_operator(program.evict);
  }
  ~ProgramMode() { internal::set_evict_after_every_operator(false); }
  ProgramMode(const ProgramMode&) = delete;

 private:
  WriteChecks checks_;
};

}  // namespace fsdp::testing
