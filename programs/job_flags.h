// The flags that say how a job is sharded and what its steps are, of the programs that
// train it or plan it.
#pragma once

#include "programs/trainer/setup/training_options.h"

#include <absl/flags/declare.h>

#include <cstdint>
#include <string>

ABSL_DECLARE_FLAG(std::string, mesh);
ABSL_DECLARE_FLAG(int64_t, replicas);
ABSL_DECLARE_FLAG(int64_t, tp);
ABSL_DECLARE_FLAG(std::string, reshard_after_forward);
ABSL_DECLARE_FLAG(bool, checkpoint_activations);

namespace programs {

// Of --ranks, or --mesh. Throws ValueError that names the flag.
struct JobShape {
  int64_t ranks, replicas;
};
JobShape job_shape();

// Sets what the flags of this file say. Throws ValueError that names the flag, its value
// and what is allowed.
void set_job_options(TrainingOptions& options);

}  // namespace programs
