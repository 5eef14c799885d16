#include "programs/trainer/report/page/step_points.h"

#include <algorithm>

namespace programs::run_report {
namespace {

StepPoint merged(const StepPoint* first, const StepPoint* last) {
  StepPoint point;
  const auto count = static_cast<double>(last - first);
  for (const auto* each = first; each != last; ++each) {
    point.step = each->step;
    point.loss += each->loss / count;
    point.tokens_per_second += each->tokens_per_second / count;
    point.waiting += each->waiting / count;
    point.peak_bytes = std::max(point.peak_bytes, each->peak_bytes);
  }
  return point;
}

}  // namespace

std::vector<StepPoint> thinned(const std::vector<StepPoint>& points, size_t most) {
  const size_t group = (points.size() + most - 1) / most;
  if (group <= 1) return points;
  std::vector<StepPoint> result;
  for (size_t first = 0; first < points.size(); first += group) {
    const size_t last = std::min(first + group, points.size());
    result.push_back(merged(points.data() + first, points.data() + last));
  }
  return result;
}

void ThinnedPoints::add(const StepPoint& point) {
  if (in_last_ < group_) {
    auto& last = points_.back();
    const auto mean = [count = static_cast<double>(++in_last_)](double& of, double next) {
      of += (next - of) / count;
    };
    last.step = point.step;
    mean(last.loss, point.loss);
    mean(last.tokens_per_second, point.tokens_per_second);
    mean(last.waiting, point.waiting);
    last.peak_bytes = std::max(last.peak_bytes, point.peak_bytes);
    return;
  }
  if (points_.size() == most_) {
    points_ = thinned(points_, most_ / 2);
    group_ *= 2;
  }
  points_.push_back(point);
  in_last_ = 1;
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*std::max_element(values.begin(), middle) + *middle) / 2;
}

}  // namespace programs::run_report
