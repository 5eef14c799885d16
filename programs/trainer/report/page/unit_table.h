// What each unit costs in a step. Pure.
#pragma once

#include "programs/trainer/report/page/rank_step.h"
#include "programs/trainer/report/page/unit_facts.h"

#include <cstdint>
#include <vector>

namespace programs::run_report {

// Means over steps and ranks.
struct UnitRow {
  UnitFacts unit;
  double gathers = 0;          // of a step
  double prefetched = 0;       // of these, issued before their unit was used
  double unused = 0;           // of these, dropped before their unit was used
  double gathered_bytes = 0;   // from other ranks
  double exposed_seconds = 0;  // that the host waited for its gathers
  double unsharded_share = 0;  // of the step's time
  bool is_first = false;       // the first that a step gathers: nothing could gather it ahead
};

// A row for each of `units`, in their order. Keeps sums of the steps, of any ranks.
class UnitTable {
 public:
  explicit UnitTable(const std::vector<UnitFacts>& units);

  void add(const RankStep& step);
  int64_t steps() const { return steps_; }
  std::vector<UnitRow> rows() const;

 private:
  std::vector<UnitRow> sums_;
  int64_t steps_ = 0;
};

}  // namespace programs::run_report
