// What is drawn over the steps of a run. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace examples::run_report {

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

// 0 where there are none.
double median(std::vector<double> values);

}  // namespace examples::run_report
