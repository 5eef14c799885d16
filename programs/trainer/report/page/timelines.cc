#include "programs/trainer/report/page/timelines.h"

#include <algorithm>
#include <utility>

namespace programs::run_report {
namespace {

double seconds_of(const Span& span) { return span.end - span.begin; }

double seconds_within(const Span& phase, const std::vector<Span>& spans) {
  double sum = 0;
  for (const auto& span : spans) {
    if (phase.begin <= span.begin && span.end <= phase.end) sum += seconds_of(span);
  }
  return sum;
}

// Without what it waits in these phases, and what DTensors move.
double computing_seconds(const RankStep& step) {
  double sum = 0;
  for (const auto& phase : step.phases) {
    if (!computes(phase)) continue;
    sum += seconds_of(phase) - seconds_within(phase, step.waits) -
           seconds_within(phase, step.redistributions);
  }
  return sum;
}

}  // namespace

bool Timelines::add(int64_t rank, const Trace& trace) {
  const auto steps = steps_of(trace);
  if (steps.empty()) return false;
  double computing = 0;
  for (const auto& step : steps) {
    units_.add(step);
    seconds_ += step.seconds;
    computing += computing_seconds(step) / static_cast<double>(steps.size());
  }
  RankTimeline timeline{rank, steps.back(), ""};
  if (!base_nanoseconds_) base_nanoseconds_ = trace.base_nanoseconds;
  const auto since = static_cast<double>(trace.base_nanoseconds - *base_nanoseconds_);
  timeline.step->clock = has_one_clock_ ? timeline.step->clock + 1e-9 * since : 0;
  const bool is_slowest = ranks_++ == 0 || computing > longest_;
  if (is_slowest) {
    longest_ = computing;
    slowest_ = timeline;
  }
  if (first_.size() < kFirst) first_.push_back(std::move(timeline));
  return true;
}

std::optional<int64_t> Timelines::slowest() const {
  if (!slowest_) return std::nullopt;
  const auto rank = slowest_->rank;
  const bool is_first = std::any_of(first_.begin(), first_.end(),
                                    [&](const RankTimeline& each) { return each.rank == rank; });
  return is_first ? std::nullopt : std::optional(rank);
}

std::vector<RankTimeline> Timelines::shown() const {
  auto all = first_;
  if (slowest()) all.push_back(*slowest_);
  all.insert(all.end(), missing_.begin(), missing_.end());
  return all;
}

double Timelines::mean_step_seconds() const {
  return units_.steps() == 0 ? 0 : seconds_ / static_cast<double>(units_.steps());
}

}  // namespace programs::run_report
