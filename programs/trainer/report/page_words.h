// What the page of a run (run_page.h) says in sentences and names.
#pragma once

#include "programs/trainer/report/page/advice.h"
#include "programs/trainer/report/page/memory_bound.h"
#include "programs/trainer/report/page/unit_facts.h"
#include "programs/trainer/setup/training_options.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace programs {

struct RanksAndHosts {
  int64_t ranks, hosts;
};

// Names and values of what the run was asked for.
std::vector<std::pair<std::string, std::string>> settings_in_words(
    const TrainingOptions& options, const RanksAndHosts& where,
    const std::vector<run_report::UnitFacts>& units);

// Whether units stay unsharded between forward and backward, which is not in the bound.
bool keeps_units(const TrainingOptions& options);

// Which bound is drawn, or why none.
std::string about_bound(const TrainingOptions& options, const run_report::Sharding& sharding);
// What the advice has looked at.
std::string about_advice(const run_report::RunFacts& facts);

}  // namespace programs
