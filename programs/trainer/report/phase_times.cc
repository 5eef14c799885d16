#include "programs/trainer/report/phase_times.h"

namespace programs {

const char* name(Phase phase) {
  switch (phase) {
    case Phase::kData:
      return "data";
    case Phase::kForward:
      return "forward";
    case Phase::kBackward:
      return "backward";
    case Phase::kOptimizer:
      return "optimizer";
    case Phase::kMetrics:
      return "exchange of losses";
    case Phase::kUnsharded:
      return "unsharded model";
    case Phase::kValidation:
      return "validation";
    case Phase::kGeneration:
      return "generation";
  }
  return "";
}

bool is_training(Phase phase) { return phase <= Phase::kMetrics; }

PhaseTime PhaseTimes::training() const {
  PhaseTime sum;
  for (Phase phase : kPhases) {
    if (!is_training(phase)) continue;
    sum.seconds += of(phase).seconds;
    sum.waiting += of(phase).waiting;
  }
  return sum;
}

double PhaseTimes::computing() const {
  const auto all = training(), exchange = of(Phase::kMetrics);
  return (all.seconds - all.waiting) - (exchange.seconds - exchange.waiting);
}

}  // namespace programs
