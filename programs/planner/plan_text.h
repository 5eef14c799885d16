// A planned step, for people and for programs.
#pragma once

#include "programs/planner/measured_step.h"
#include "programs/planner/policy_search.h"
#include "programs/planner/step_estimate.h"
#include "programs/trainer/setup/sharded_model.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace programs {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

struct PlannedJobText {
  MeshDims mesh;
  int64_t rank = 0;
  int64_t ranks_per_node = 8;
  double tokens = 0;      // of the global batch
  double parameters = 0;  // of the model
  bool recomputes = false;
  // Of the same job with activations recomputed, where it keeps them, or kept.
  std::optional<StepMemory> otherwise;
  MachineRates rates;
};

// Tables of memory and of traffic, and the estimate.
std::string text_of(const MeasuredStep& step, const PlannedJobText& job);
// Memory and traffic in bytes, as one JSON object on one line.
std::string json_of(const MeasuredStep& step, const PlannedJobText& job);

// The first five of `fit`, a line each.
std::string text_of_fit(const std::vector<PlannedPolicy>& fit, const MachineRates& rates);

LinkBytes link_bytes(const MeasuredStep& step, const PlannedJobText& job);

}  // namespace programs
