#include "programs/trainer/report/step_history.h"

#include <algorithm>
#include <cstddef>

namespace programs {
namespace {

constexpr size_t kFewestSteps = 10;

double seconds_of_step(const RankMetrics& now, const RankMetrics& before) {
  return now.training_seconds - before.training_seconds;
}

double waiting_in_step(const RankMetrics& now, const RankMetrics& before) {
  return (now.waiting_seconds - before.waiting_seconds) / seconds_of_step(now, before);
}

template <class Value>
void keep(std::deque<Value>& values, Value value) {
  values.push_back(value);
  if (values.size() > StepHistory::kStepsKept) values.pop_front();
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
  if (steps_++ > 0) add_loads(ranks);
  points_.add(point);
  keep(tokens_per_second_, point.tokens_per_second);
  keep(waiting_, point.waiting);
  last_ = ranks;
}

void StepHistory::add_loads(const std::vector<RankMetrics>& ranks) {
  by_rank_.resize(ranks.size());
  size_t slowest = 0;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    auto& steps = by_rank_[rank];
    keep(steps.waiting, waiting_in_step(ranks[rank], last_[rank]));
    keep(steps.computing_seconds, ranks[rank].computing_seconds - last_[rank].computing_seconds);
    if (steps.computing_seconds.back() > by_rank_[slowest].computing_seconds.back()) slowest = rank;
  }
  keep(slowest_, slowest);
}

double StepHistory::median(const std::deque<double>& values) {
  return run_report::median({values.begin(), values.end()});
}

std::vector<run_report::RankLoad> StepHistory::loads() const {
  if (slowest_.size() < kFewestSteps) return {};
  std::vector<run_report::RankLoad> loads;
  for (const auto& steps : by_rank_)
    loads.push_back({median(steps.waiting), median(steps.computing_seconds)});
  for (const auto rank : slowest_) loads[rank].slowest += 1 / static_cast<double>(slowest_.size());
  return loads;
}

}  // namespace programs
