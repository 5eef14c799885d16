#include "examples/run_report/step_points.h"

#include <algorithm>

namespace examples::run_report {
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

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace examples::run_report
