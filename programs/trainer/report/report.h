// What a training run prints: rank 0 writes to stdout, the others nothing.
#pragma once

#include "programs/trainer/report/phase_times.h"
#include "programs/trainer/report/rank_metrics.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace programs {

class Report {
 public:
  // tokens_per_step: of the global batch.
  Report(int64_t rank, int64_t steps, int64_t tokens_per_step);

  // A line of its own.
  void say(const std::string& line);
  // The live line: rewritten at every step on a terminal, else a line at the first, the
  // last and every 20th part of the steps. `ranks` is what exchange() returned;
  // `unsharded_loss` and `note` are shown where there are such.
  void step(int64_t step, const std::vector<RankMetrics>& ranks,
            std::optional<double> unsharded_loss, const std::string& note = {});
  // Training goes on after step `step` of an earlier run.
  void start_after(int64_t step);
  // The tables of where time and memory went.
  void time_table(const PhaseTimes& times);
  void memory_table(const std::vector<RankMetrics>& ranks, double unsharded_bytes);

 private:
  bool due(int64_t step) const;

  const bool prints_;
  const bool terminal_;
  const int64_t steps_;
  const int64_t tokens_per_step_;
  bool line_open_ = false;  // the live line has no newline yet
  int64_t shown_step_ = 0;  // the step of the last live line, and what rank 0's clock said then
  double shown_seconds_ = 0;
  double shown_waiting_ = 0;
};

}  // namespace programs
