// The page of a run: one HTML file that needs no other and no network (--report).
#pragma once

#include "programs/trainer/report/page/advice.h"
#include "programs/trainer/report/page/step_points.h"
#include "programs/trainer/report/page/timelines.h"
#include "programs/trainer/report/page/unit_table.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace programs::run_report {

struct Run {
  std::string title;
  std::vector<std::pair<std::string, std::string>> facts;  // name and value, at the top
  std::vector<StepPoint> steps;
  std::vector<std::pair<int64_t, double>> validations;  // step and loss
  std::optional<int64_t> bound;  // of bytes beside the shards; none where it does not hold
  std::string about_bound;       // whole sentences
  int64_t unsharded_bound = 0;   // of parameters
  std::string profiled;          // whole sentences about which steps, and where traces are
  std::vector<RankTimeline> timelines;
  std::vector<UnitRow> units;
  std::vector<Advice> advice;
  std::string about_advice;  // whole sentences
};

std::string page_of(const Run& run);

}  // namespace programs::run_report
