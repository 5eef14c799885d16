#include "programs/trainer/report/page/rank_step.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <optional>
#include <utility>

namespace programs::run_report {
namespace {

bool contains(const Range& outer, const Range& inner) {
  return outer.begin <= inner.begin && inner.end <= outer.end;
}

// What becomes of units from the first range of a trace to the last. Times are the
// trace's.
class UnitsOverTime {
 public:
  explicit UnitsOverTime(const Trace& trace) {
    for (const auto& range : trace.ranges) take(range);
    const double end = trace.ranges.empty() ? 0 : trace.ranges.back().end;
    for (const auto& [unit, begin] : unsharded_since_) unsharded.push_back({unit, begin, end});
  }

  std::vector<Gather> gathers;
  std::vector<Span> reductions, unsharded;

 private:
  void take(const Range& range) {
    switch (range.kind) {
      case RangeKind::kPhase:
        phase_ = range;
        return;
      case RangeKind::kPrefetch:
        prefetch_ = range;
        return;
      case RangeKind::kGather:
        return gather(range);
      case RangeKind::kOuterGather:
        outer_[range.of].bytes += range.bytes;
        return;
      case RangeKind::kCopyOut:
        return copy_out(range);
      case RangeKind::kReduction:
        return reduce(range);
      case RangeKind::kWait:
        return wait(range);
      case RangeKind::kReshard:
        return reshard(range);
      default:
        return;
    }
  }

  void gather(const Range& range) {
    drop(range.of, range.begin);
    const bool is_prefetch = prefetch_ && prefetch_->of == range.of && contains(*prefetch_, range);
    gathering_[range.of] = gathers.size();
    const auto outer = std::exchange(outer_[range.of], {});
    gathers.push_back({{range.of, range.begin, range.end},
                       is_prefetch,
                       true,
                       range.bytes + outer.bytes,
                       outer.waited});
  }

  void copy_out(const Range& range) {
    copy_out_ = range;
    unsharded_since_.try_emplace(range.of, range.begin);
    const auto found = gathering_.find(range.of);
    if (found == gathering_.end()) return;
    gathers[found->second].end = range.end;
    waited_for_ = found->second;
    gathering_.erase(found);
  }

  // Of a gather that nobody waited for.
  void drop(const std::string& unit, double now) {
    const auto found = gathering_.find(unit);
    if (found == gathering_.end()) return;
    gathers[found->second].is_used = false;
    gathers[found->second].end = now;
    gathering_.erase(found);
  }

  // Where nobody waits for it, its sum is taken at the end of the backward.
  void reduce(const Range& range) {
    const bool is_in_phase = phase_ && contains(*phase_, range);
    sent_[range.of] = reductions.size();
    reductions.push_back({range.of, range.begin, is_in_phase ? phase_->end : range.end});
  }

  void wait(const Range& range) {
    if (copy_out_ && copy_out_->of == range.of && contains(*copy_out_, range)) {
      if (waited_for_) gathers[*waited_for_].waited += range.end - range.begin;
      return;
    }
    if (auto& outer = outer_[range.of]; outer.bytes > 0) {
      outer.waited += range.end - range.begin;
      return;
    }
    const auto found = sent_.find(range.of);
    if (found == sent_.end()) return;
    reductions[found->second].end = range.end;
    sent_.erase(found);
  }

  void reshard(const Range& range) {
    drop(range.of, range.begin);
    const auto found = unsharded_since_.find(range.of);
    const double begin = found == unsharded_since_.end() ? 0 : found->second;
    // What was dropped before its use was never unsharded.
    const bool was_unsharded = found != unsharded_since_.end() || !seen(range.of);
    if (was_unsharded) unsharded.push_back({range.of, begin, range.begin});
    if (found != unsharded_since_.end()) unsharded_since_.erase(found);
  }

  // Whether the trace had a gather of it.
  bool seen(const std::string& unit) const {
    return std::any_of(gathers.begin(), gathers.end(),
                       [&](const Gather& gather) { return gather.of == unit; });
  }

  // Of HFSDP, over the outer dimension: the first part of a unit's next gather.
  struct Outer {
    int64_t bytes = 0;
    double waited = 0;
  };

  std::optional<Range> phase_, prefetch_, copy_out_;
  std::map<std::string, Outer> outer_;
  std::optional<size_t> waited_for_;
  std::map<std::string, size_t> gathering_, sent_;
  std::map<std::string, double> unsharded_since_;
};

// Its part within the step, from whose beginning it counts then.
std::optional<Span> clipped(const Span& span, const Range& step) {
  const double begin = std::max(span.begin, step.begin), end = std::min(span.end, step.end);
  if (begin >= end) return std::nullopt;
  return Span{span.of, begin - step.begin, end - step.begin};
}

void add_clipped(std::vector<Span>& to, const Span& span, const Range& step) {
  if (auto part = clipped(span, step)) to.push_back(*std::move(part));
}

// Of the phases that have begun.
bool is_in_computing_phase(const std::vector<Span>& phases, const Span& span) {
  return std::any_of(phases.begin(), phases.end(), [&](const Span& phase) {
    return computes(phase) && phase.begin <= span.begin && span.end <= phase.end;
  });
}

RankStep rank_step(const Trace& trace, const UnitsOverTime& units, const Range& step) {
  RankStep result;
  result.number = std::atoll(step.of.c_str());
  result.clock = step.begin;
  result.seconds = step.end - step.begin;
  for (const auto& range : trace.ranges) {
    if (!contains(step, range)) continue;
    const Span span{range.of, range.begin - step.begin, range.end - step.begin};
    if (range.kind == RangeKind::kPhase) result.phases.push_back(span);
    if (range.kind == RangeKind::kWait) result.waits.push_back(span);
    if (range.kind == RangeKind::kRedistribution && is_in_computing_phase(result.phases, span))
      result.redistributions.push_back(span);
  }
  for (const auto& reduction : units.reductions) add_clipped(result.reductions, reduction, step);
  for (const auto& span : units.unsharded) add_clipped(result.unsharded, span, step);
  for (auto gather : units.gathers) {
    if (gather.begin < step.begin || gather.begin >= step.end) continue;
    gather.begin -= step.begin;
    gather.end = std::min(gather.end, step.end) - step.begin;
    result.gathers.push_back(std::move(gather));
  }
  return result;
}

}  // namespace

bool computes(const Span& phase) {
  return phase.of == "forward" || phase.of == "backward" || phase.of == "optimizer";
}

std::vector<RankStep> steps_of(const Trace& trace) {
  const UnitsOverTime units(trace);
  std::vector<RankStep> steps;
  for (const auto& range : trace.ranges) {
    if (range.kind == RangeKind::kStep) steps.push_back(rank_step(trace, units, range));
  }
  return steps;
}

}  // namespace programs::run_report
