// What the ranks told each other after every step of a run, for its page.
#pragma once

#include "programs/trainer/report/page/advice.h"
#include "programs/trainer/report/page/step_points.h"
#include "programs/trainer/report/rank_metrics.h"

#include <cstdint>
#include <deque>
#include <vector>

namespace programs {

// Of bounded size, however many steps there are. Local.
class StepHistory {
 public:
  // The last ones, which medians are of.
  static constexpr size_t kStepsKept = 1000;

  explicit StepHistory(int64_t tokens_per_step) : tokens_per_step_(tokens_per_step) {}

  // `ranks` is what exchange() returned after step `step`.
  void add(int64_t step, const std::vector<RankMetrics>& ranks);

  int64_t steps() const { return steps_; }
  // Thinned, where there are many.
  const std::vector<run_report::StepPoint>& points() const { return points_.points(); }
  double median_tokens_per_second() const { return median(tokens_per_second_); }
  double median_waiting() const { return median(waiting_); }
  // By rank, medians over the steps but the first, in which all are slow; empty for fewer
  // than ten such steps.
  std::vector<run_report::RankLoad> loads() const;
  // Of all ranks, after the last step.
  const std::vector<RankMetrics>& last() const { return last_; }

 private:
  struct StepsOfRank {
    std::deque<double> waiting, computing_seconds;
  };

  static double median(const std::deque<double>& values);
  void add_loads(const std::vector<RankMetrics>& ranks);

  const int64_t tokens_per_step_;
  int64_t steps_ = 0;
  run_report::ThinnedPoints points_{run_report::kMostPoints};
  std::deque<double> tokens_per_second_, waiting_;
  std::vector<StepsOfRank> by_rank_;
  std::deque<size_t> slowest_;  // rank of each step
  std::vector<RankMetrics> last_;
};

}  // namespace programs
