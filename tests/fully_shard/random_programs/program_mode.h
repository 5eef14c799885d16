// What is told to the whole process while a program runs: what its collectives go
// through, and how much every touch does: all it can, where the program empties every
// group after every operator, and else as little.
#pragma once

#include "on_demand/on_demand_storage.h"
#include "tests/fully_shard/random_programs/random_program.h"
#include "tests/support/with_environment.h"
#include "tests/support/write_checks.h"

namespace fsdp::testing {

// Process-wide: one at a time, outside the ranks' threads.
class ProgramMode {
 public:
  explicit ProgramMode(const Program& program)
      : peer_memory_("FSDP_PEER_MEMORY", peer_memory_of(program)), checks_(program.evict) {
    internal::set_evict_after_every_operator(program.evict);
  }
  ~ProgramMode() { internal::set_evict_after_every_operator(false); }
  ProgramMode(const ProgramMode&) = delete;

 private:
  static const char* peer_memory_of(const Program& program) {
    switch (program.transport) {
      case ProgramTransport::kTestBackend:
      case ProgramTransport::kInPlace:
        return "on";
      case ProgramTransport::kCopies:
        return "copy";
      case ProgramTransport::kGloo:
        return "off";
    }
    return "";
  }

  WithEnvironment peer_memory_;
  WriteChecks checks_;
};

}  // namespace fsdp::testing
