// The page of a run (page/page.h) as training goes on: every step's numbers, and a
// profile of every rank for some steps in the middle. Rank 0 writes the page at the end,
// from the traces that all ranks have written beside it: "report.html" has
// "report.trace.rank0.json" and so on, which Perfetto opens. Where --profile is given,
// too, its trace is rank 0's of these. A trace that cannot be written ends no run.
#pragma once

#include "device_mesh/device_mesh.h"
#include "fully_shard/profile.h"
#include "programs/trainer/report/page/page.h"
#include "programs/trainer/report/profiled_steps.h"
#include "programs/trainer/report/rank_metrics.h"
#include "programs/trainer/report/step_history.h"
#include "programs/trainer/setup/training_options.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace programs {

// Throws ValueError, naming both flags, where of --metrics, --profile, --report and the
// traces beside the last one two are one file. Local.
void check_files_of_page(const TrainingOptions& options, int64_t ranks);

// Where the ranks run.
struct Hosts {
  int64_t count = 1;
  int64_t ranks_here = 1;  // on this host, with this one
};

class RunPage {
 public:
  // Where options.report is empty, every call does nothing. Throws as
  // check_files_of_page() does. Local.
  RunPage(const TrainingOptions& options, const fsdp::DeviceMesh& mesh,
          const fsdp::DeviceMesh& data_mesh);

  bool is_wanted() const { return !options_.report.empty(); }
  // Before the step after `done`. Collective over the world.
  void start(int64_t done);
  // Within a step, while units are unsharded. Local.
  void see_unsharded();
  // After each step; `ranks` is what exchange() returned. Local.
  void step(int64_t step, const std::vector<RankMetrics>& ranks);
  void validated(int64_t step, double loss);
  // After the last step and a collective behind it; `model` is the sharded one. Rank 0
  // alone does something: nothing, and says so, where there was no step. Throws
  // c10::Error where the page cannot be written.
  void write(torch::nn::Module& model);

 private:
  std::string trace_of(int64_t rank) const;
  // What an earlier run has left is not taken for this one's.
  void remove_old_traces() const;
  void end_step_of_trace();
  run_report::Run run_of(const std::vector<run_report::UnitFacts>& units) const;
  run_report::Timelines read_timelines(const std::vector<run_report::UnitFacts>& units) const;
  run_report::RunFacts facts_for_advice() const;
  std::string about_profile(const run_report::Timelines& timelines) const;
  void copy_trace_of_rank_0() const;

  const TrainingOptions options_;
  const fsdp::DeviceMesh mesh_, data_mesh_;
  Hosts hosts_;
  int64_t done_ = 0, steps_ = 0;  // before this run, and of it
  ProfiledSteps profiled_;
  std::optional<fsdp::Profile> profile_;
  bool shows_in_place_ = false, has_copies_ = false;
  StepHistory history_;  // rank 0's
  run_report::ThinnedPoints validations_{run_report::kMostPoints};
};

}  // namespace programs
