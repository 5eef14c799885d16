// Where the time of a run went: seconds per phase, and how much of each was spent waiting
// for communication. Profilers see the phases as ranges.
//
//   PhaseTimes times([&] { return fsdp::counters(mesh).wait_seconds; });
//   auto loss = times.measure(Phase::kForward, [&] { return model->forward(tokens); });
#pragma once

#include "programs/trainer/report/training_range.h"

#include <array>
#include <chrono>
#include <functional>
#include <utility>

namespace programs {

enum class Phase {
  kData,
  kForward,
  kBackward,
  kOptimizer,
  kMetrics,
  kUnsharded,
  kValidation,
  kGeneration
};
constexpr std::array kPhases = {Phase::kData,       Phase::kForward,   Phase::kBackward,
                                Phase::kOptimizer,  Phase::kMetrics,   Phase::kUnsharded,
                                Phase::kValidation, Phase::kGeneration};
const char* name(Phase phase);
// Data, forward, backward, optimizer and metrics: what a step of the sharded model needs.
bool is_training(Phase phase);

struct PhaseTime {
  double seconds = 0;
  double waiting = 0;  // part of seconds
};

// Of one rank; not thread-safe.
class PhaseTimes {
 public:
  // waited(): seconds spent waiting for communication so far.
  explicit PhaseTimes(std::function<double()> waited) : waited_(std::move(waited)) {}

  // Calls work() and adds what it took to `phase`. Not nested.
  template <class Work>
  auto measure(Phase phase, Work&& work) {
    Span span(*this, phase);
    return std::forward<Work>(work)();
  }

  PhaseTime of(Phase phase) const { return times_[static_cast<size_t>(phase)]; }
  PhaseTime training() const;  // sum over the phases that is_training() names
  double computing() const;    // seconds of these but for waiting and the exchange of losses

 private:
  class Span {
   public:
    Span(PhaseTimes& times, Phase phase)
        : range_("phase", name(phase)), times_(times), phase_(phase), waited_(times.waited_()) {}
    ~Span() {
      auto& time = times_.times_[static_cast<size_t>(phase_)];
      time.seconds +=
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
      time.waiting += times_.waited_() - waited_;
    }

   private:
    TrainingRange range_;
    PhaseTimes& times_;
    Phase phase_;
    double waited_;
    std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  };

  std::function<double()> waited_;
  std::array<PhaseTime, kPhases.size()> times_ = {};
};

}  // namespace programs
