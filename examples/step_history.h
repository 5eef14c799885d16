// What the ranks told each other after every step of a run, for its page.
#pragma once

#include "examples/rank_metrics.h"
#include "examples/run_report/advice.h"
#include "examples/run_report/step_points.h"

#include <cstdint>
#include <vector>

namespace examples {

// Local.
class StepHistory {
 public:
  explicit StepHistory(int64_t tokens_per_step) : tokens_per_step_(tokens_per_step) {}

  // `ranks` is what exchange() returned after step `step`.
  void add(int64_t step, const std::vector<RankMetrics>& ranks);

  const std::vector<run_report::StepPoint>& points() const { return points_; }
  // By rank, medians over the steps but the first, in which all are slow; empty for fewer
  // than ten such steps.
  std::vector<run_report::RankLoad> loads() const;
  // Of all ranks, after the last step.
  const std::vector<RankMetrics>& last() const { return last_; }

 private:
  struct StepsOfRank {
    std::vector<double> waiting, computing_seconds;
    int64_t slowest = 0;  // how many
  };

  void add_loads(const std::vector<RankMetrics>& ranks);

  const int64_t tokens_per_step_;
  std::vector<run_report::StepPoint> points_;
  std::vector<StepsOfRank> by_rank_;
  std::vector<RankMetrics> last_;
};

}  // namespace examples
