// Training in which backwards throw, each followed at once by a step that does not.
#pragma once

#include "tests/training_programs/program_rank.h"

#include <cstdint>

namespace fsdp::testing {

inline constexpr int64_t kFailingLayers = 4;

// What follows a failed backward before the next forward.
enum class Next {
  kForward,
  kExplicitUnshard,
  kWriteEntries,
  kExplicitReshard,
  kEndOfUnsharded,  // a scope of a parameter that the backward was in
  kOtherPolicies,
  kFullPrecision,
  kNewSchedule,
  kDescription,
  kDestruction,  // of the model; another one goes on
};

// Steps of SGD; before each one a backward through layer `throwing`, of kFailingLayers,
// throws.
TrainingProgram failing_backwards(int64_t throwing, Next next);

}  // namespace fsdp::testing
