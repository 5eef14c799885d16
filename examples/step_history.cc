#include "examples/step_history.h"

#include <algorithm>
#include <cstddef>

namespace examples {
namespace {

constexpr size_t kFewestSteps = 10;

double seconds_of_step(const RankMetrics& now, const RankMetrics& before) {
  return now.training_seconds - before.training_seconds;
}

double waiting_in_step(const RankMetrics& now, const RankMetrics& before) {
  return (now.waiting_seconds - before.waiting_seconds) / seconds_of_step(now, before);
}

}  // namespace

void StepHistory::add(int64_t step, const std::vector<RankMetrics>& ranks) {
  if (last_.empty()) last_.resize(ranks.size());
  run_report::StepPoint point{.step = step, .loss = mean_loss(ranks)};
  point.tokens_per_second =
      static_cast<double>(tokens_per_step_) / seconds_of_step(ranks[0], last_[0]);
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    point.waiting += waiting_in_step(ranks[rank], last_[rank]) / static_cast<double>(ranks.size());
    point.peak_bytes = std::max(point.peak_bytes, ranks[rank].step_peak_bytes);
  }
  if (!points_.empty()) add_loads(ranks);
  points_.push_back(point);
  last_ = ranks;
}

void StepHistory::add_loads(const std::vector<RankMetrics>& ranks) {
  by_rank_.resize(ranks.size());
  size_t slowest = 0;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    auto& steps = by_rank_[rank];
    steps.waiting.push_back(waiting_in_step(ranks[rank], last_[rank]));
    steps.computing_seconds.push_back(ranks[rank].computing_seconds -
                                      last_[rank].computing_seconds);
    if (steps.computing_seconds.back() > by_rank_[slowest].computing_seconds.back()) slowest = rank;
  }
  ++by_rank_[slowest].slowest;
}

std::vector<run_report::RankLoad> StepHistory::loads() const {
  std::vector<run_report::RankLoad> loads;
  for (const auto& steps : by_rank_) {
    const auto count = steps.waiting.size();
    if (count < kFewestSteps) return {};
    loads.push_back({run_report::median(steps.waiting), run_report::median(steps.computing_seconds),
                     static_cast<double>(steps.slowest) / static_cast<double>(count)});
  }
  return loads;
}

}  // namespace examples
