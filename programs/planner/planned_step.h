// A step of a job of any size in this process: one of its ranks on a fake device, with a
// world of which the other ranks are not there. Units, schedule, layouts and optimizer
// are the real ones.
#pragma once

#include "programs/planner/measured_step.h"

#include <cstdint>

namespace programs {

// The ranks of a job, of which `rank` is planned: rank 0 has the largest shards.
struct PlannedJob {
  int64_t ranks = 1;
  int64_t rank = 0;
};

// Throws as training would: ValueError for a mesh that does not fit. Makes the process's
// PrivateUse1 device the fake one, and needs that no process group is there. Local.
MeasuredStep plan_step(TrainingOptions options, const PlannedJob& job);

}  // namespace programs
