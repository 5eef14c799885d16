// What is drawn over the steps of a run. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace programs::run_report {

constexpr size_t kMostPoints = 600;  // of a run

struct StepPoint {
  int64_t step = 0;
  double loss = 0;
  double tokens_per_second = 0;
  double waiting = 0;     // share of the time, of all ranks' mean
  double peak_bytes = 0;  // of the rank that had most beside its shards in this step
};

// At most `most` of them, for runs of many steps: neighbours become one, with their last
// step, their means and their highest peak.
std::vector<StepPoint> thinned(const std::vector<StepPoint>& points, size_t most);

// The same of points that come one by one, of which no more are kept.
class ThinnedPoints {
 public:
  explicit ThinnedPoints(size_t most) : most_(most / 2 * 2) {}  // 2 or more

  void add(const StepPoint& point);
  const std::vector<StepPoint>& points() const { return points_; }

 private:
  size_t most_;
  std::vector<StepPoint> points_;
  size_t group_ = 1, in_last_ = 1;  // steps of each point, and of the last one
};

// The mean of the two in the middle of an even number; 0 where there are none.
double median(std::vector<double> values);

}  // namespace programs::run_report
