// Which of all ranks' profiles the page shows: those of the first ranks, and that of the
// one that computes longest. Of the others sums alone are kept.
#pragma once

#include "programs/trainer/report/page/rank_step.h"
#include "programs/trainer/report/page/trace.h"
#include "programs/trainer/report/page/unit_table.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace programs::run_report {

struct RankTimeline {
  int64_t rank = 0;
  std::optional<RankStep> step;
  std::string missing;  // why there is none
};

class Timelines {
 public:
  static constexpr size_t kFirst = 8;

  // has_one_clock: that of the host which all ranks run on. Of several hosts clocks do
  // not tell which rank was first.
  Timelines(const std::vector<UnitFacts>& units, bool has_one_clock)
      : units_(units), has_one_clock_(has_one_clock) {}

  // One rank after the other. False where there is no whole step.
  bool add(int64_t rank, const Trace& trace);
  void missing(int64_t rank, const std::string& why) { missing_.push_back({rank, {}, why}); }

  int64_t ranks() const { return ranks_; }  // with a step
  // The last step of each rank that is shown, by rank, and the ranks without one.
  std::vector<RankTimeline> shown() const;
  // The rank that computes longest, where it is none of the first: without its
  // redistributions, which times of phases (phase_times.h) do not tell from computing.
  std::optional<int64_t> slowest() const;
  std::vector<UnitRow> units() const { return units_.rows(); }
  double mean_step_seconds() const;

 private:
  UnitTable units_;
  const bool has_one_clock_;
  std::optional<int64_t> base_nanoseconds_;  // of the first trace
  int64_t ranks_ = 0;
  double seconds_ = 0;  // of all steps
  double longest_ = 0;  // that a rank computed
  std::vector<RankTimeline> first_, missing_;
  std::optional<RankTimeline> slowest_;
};

}  // namespace programs::run_report
