#include "programs/trainer/report/run_page.h"

#include "dtensor/dtensor.h"
#include "fully_shard/counters.h"
#include "fully_shard/fully_shard.h"
#include "programs/trainer/report/output_file.h"
#include "programs/trainer/report/page/memory_bound.h"
#include "programs/trainer/report/page/trace.h"
#include "programs/trainer/report/page/unit_facts.h"
#include "programs/trainer/report/page_words.h"
#include "programs/words.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <set>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <thread>

namespace programs {
namespace {

// Beside the page.
std::string trace_beside(const std::string& report, int64_t rank) {
  auto path = std::filesystem::path(report);
  return path.replace_extension(".trace.rank" + std::to_string(rank) + ".json").string();
}

void add_results(run_report::Run& run, const StepHistory& history) {
  double peak = 0, process = 0;
  for (const auto& point : run.steps) peak = std::max(peak, point.peak_bytes);
  for (const auto& rank : history.last()) process = std::max(process, rank.resident_peak_bytes);
  const bool is_of_all = history.steps() <= static_cast<int64_t>(StepHistory::kStepsKept);
  const std::string median =
      is_of_all ? "median"
                : "median of the last " + std::to_string(StepHistory::kStepsKept) + " steps";
  run.facts.insert(
      run.facts.end(),
      {{"steps", std::to_string(history.steps())},
       {"last loss", formatted("%.4f", mean_loss(history.last()))},
       {"throughput, " + median, formatted("%.0f tokens/s", history.median_tokens_per_second())},
       {"waiting, " + median, formatted("%.0f %%", 100 * history.median_waiting())},
       {"peak beside shards", bytes_in_words(peak)},
       {"peak of a process", bytes_in_words(process)}});
}

// By the names of hosts. Collective over the mesh.
Hosts hosts_of(const fsdp::DeviceMesh& mesh) {
  std::array<char, 256> name = {};
  gethostname(name.data(), name.size() - 1);
  const auto mine = static_cast<int64_t>(std::hash<std::string_view>()(name.data()));
  const auto all = rows_of_ranks(at::tensor({mine}, at::kLong), mesh);
  std::set<int64_t> different;
  Hosts hosts{.ranks_here = 0};
  for (int64_t rank = 0; rank < all.size(0); ++rank) {
    const auto host = all[rank][0].item<int64_t>();
    different.insert(host);
    if (host == mine) ++hosts.ranks_here;
  }
  hosts.count = static_cast<int64_t>(different.size());
  return hosts;
}

constexpr int64_t kAlignment = 64;  // bytes, of a shard in its row

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

int64_t padded(int64_t elements, c10::ScalarType dtype) {
  return aligned(elements * static_cast<int64_t>(c10::elementSize(dtype)));
}

// Rank 0 has the longest part of each parameter, so its own says how long rows are.
run_report::UnitFacts facts_of(const fsdp::FSDPModule& unit,
                               const fsdp::MixedPrecisionPolicy& precision, int64_t parts) {
  run_report::UnitFacts facts{.name = unit.is_root() ? "(root)" : unit.name(),
                              .is_root = unit.is_root()};
  int64_t flags = 0;  // of each part of a row: whether anybody used the parameter
  for (const auto& parameter : unit.parameters()) {
    const auto own = parameter.scalar_type();
    const auto computed = precision.param_dtype.value_or(own);
    const auto reduced = precision.reduce_dtype.value_or(own);
    const auto elements = fsdp::DTensor(parameter).to_local().numel();
    const auto bytes = parts * padded(elements, computed);
    ++facts.parameters;
    facts.bytes += bytes;
    if (!parameter.requires_grad()) continue;
    facts.gradient_bytes += std::max(bytes, parts * padded(elements, reduced));
    flags += static_cast<int64_t>(c10::elementSize(reduced));
  }
  if (flags > 0) facts.gradient_bytes += parts * aligned(flags);
  return facts;
}

// Those with parameters, in the order of fsdp_modules(). data_ranks: of data_mesh_of().
std::vector<run_report::UnitFacts> facts_of_units(torch::nn::Module& model,
                                                  const TrainingOptions& options,
                                                  int64_t data_ranks) {
  const bool cuts_over_all = options.sharding.outer == fsdp::Outer::kShardOptimizer;
  const int64_t parts = cuts_over_all ? data_ranks : data_ranks / options.replicas;
  std::vector<run_report::UnitFacts> units;
  for (const auto& unit : fsdp::fsdp_modules(model)) {
    auto facts = facts_of(unit, options.sharding.mp_policy, parts);
    if (facts.parameters > 0) units.push_back(std::move(facts));
  }
  return units;
}

}  // namespace

void check_files_of_page(const TrainingOptions& options, int64_t ranks) {
  const std::vector<OutputFile> others = {{"--metrics", options.metrics},
                                          {"--profile", options.profile}};
  check_files_differ({others[0], others[1], {"--report", options.report}});
  for (int64_t rank = 0; !options.report.empty() && rank < ranks; ++rank) {
    const auto trace = trace_beside(options.report, rank);
    for (const auto& other : others)
      TORCH_CHECK_VALUE(other.path.empty() || !is_same_file(other.path, trace), other.flag, ": ",
                        other.path, " is a trace of --report, ", options.report, ", too");
  }
}

RunPage::RunPage(const TrainingOptions& options, const fsdp::DeviceMesh& mesh,
                 const fsdp::DeviceMesh& data_mesh)
    : options_(options),
      mesh_(mesh),
      data_mesh_(data_mesh),
      history_(options.batch * options.accumulate * data_mesh.size() / options.cp *
               options.tokens) {
  check_files_of_page(options, mesh.size());
}

std::string RunPage::trace_of(int64_t rank) const { return trace_beside(options_.report, rank); }

// Before the first profiled step: no rank can have written its own of this run then.
void RunPage::remove_old_traces() const {
  const auto own = mesh_.rank();
  for (int64_t rank = own; rank < (own == 0 ? mesh_.size() : own + 1); ++rank)
    std::remove(trace_of(rank).c_str());
}

void RunPage::start(int64_t done) {
  done_ = done;
  if (!is_wanted()) return;
  hosts_ = hosts_of(mesh_);
  if (done >= options_.steps) return;
  profiled_ = profiled_steps(options_.steps - done, !options_.profile.empty());
  if (profiled_.first == 1) remove_old_traces();
  auto path = std::filesystem::path(options_.report);
  // Rank 0 writes the page, and other hosts may lack its folder.
  std::error_code error;
  if (path.has_parent_path() && !std::filesystem::is_directory(path.parent_path(), error)) return;
  profile_.emplace(
      path.replace_extension(".trace.json").string(),
      fsdp::ProfileOptions{
          .first_step = profiled_.first, .last_step = profiled_.last, .on_every_rank = true});
}

void RunPage::see_unsharded() {
  if (!is_wanted()) return;
  const auto now = fsdp::counters(data_mesh_);
  shows_in_place_ |= now.in_place_bytes > 0;
  has_copies_ |= now.unsharded_bytes > 0;
}

void RunPage::step(int64_t step, const std::vector<RankMetrics>& ranks) {
  if (!is_wanted()) return;
  if (++steps_ + 1 == profiled_.first) remove_old_traces();
  end_step_of_trace();
  if (mesh_.rank() == 0) history_.add(step, ranks);
}

void RunPage::end_step_of_trace() {
  if (!profile_) return;
  try {
    profile_->step();
  } catch (const std::exception& error) {
    const auto* const rich = dynamic_cast<const c10::Error*>(&error);
    std::cerr << "--report: rank " << mesh_.rank()
              << " has no trace: " << (rich ? rich->what_without_backtrace() : error.what())
              << std::endl;
    profile_.reset();
  }
}

void RunPage::validated(int64_t step, double loss) {
  if (is_wanted() && mesh_.rank() == 0) validations_.add({.step = step, .loss = loss});
}

run_report::Timelines RunPage::read_timelines(
    const std::vector<run_report::UnitFacts>& units) const {
  run_report::Timelines timelines(units, /*has_one_clock=*/hosts_.count == 1);
  for (int64_t rank = 0; rank < mesh_.size(); ++rank) {
    try {
      const auto trace = run_report::read_trace(trace_of(rank));
      if (!timelines.add(rank, trace))
        timelines.missing(rank, trace_of(rank) + " has no whole step");
    } catch (const std::invalid_argument& error) {
      const auto where = hosts_.count > 1 ? "; each host has the traces of its own ranks" : "";
      timelines.missing(rank, error.what() + std::string(where));
    }
  }
  return timelines;
}

run_report::RunFacts RunPage::facts_for_advice() const {
  return {.sharding_ranks = data_mesh_.size() / options_.replicas,
          .replicas = options_.replicas,
          .hosts = hosts_.count,
          .ranks_on_host = hosts_.ranks_here,
          .threads_per_rank = at::get_num_threads(),
          .cores = static_cast<int64_t>(std::thread::hardware_concurrency()),
          .order_is_known = profiled_.first > 1,
          .ranks = history_.loads()};
}

run_report::Run RunPage::run_of(const std::vector<run_report::UnitFacts>& units) const {
  const run_report::Sharding sharding{.where = shows_in_place_ && !has_copies_
                                                   ? run_report::Unsharded::kInPlace
                                                   : run_report::Unsharded::kGathered,
                                      .ranks = data_mesh_.size() / options_.replicas,
                                      .has_replicas = options_.replicas > 1,
                                      .has_pending_gradients = options_.accumulate > 1};
  run_report::Run run{.steps = history_.points()};
  for (const auto& point : validations_.points())
    run.validations.emplace_back(point.step, point.loss);
  if (sharding.where == run_report::Unsharded::kInPlace || !keeps_units(options_))
    run.bound = run_report::memory_bound(units, sharding);
  run.about_bound = about_bound(options_, sharding);
  run.unsharded_bound = run_report::unsharded_bound(units);
  const auto timelines = read_timelines(units);
  run.timelines = timelines.shown();
  auto facts = facts_for_advice();
  facts.step_seconds = timelines.mean_step_seconds();
  facts.units = run.units = timelines.units();
  run.advice = run_report::advice(facts);
  run.about_advice = about_advice(facts);
  if (timelines.ranks() > 0) run.profiled = about_profile(timelines);
  return run;
}

std::string RunPage::about_profile(const run_report::Timelines& timelines) const {
  std::string ranks;
  if (timelines.ranks() > static_cast<int64_t>(run_report::Timelines::kFirst))
    ranks = " Of " + std::to_string(timelines.ranks()) + " ranks the first " +
            std::to_string(run_report::Timelines::kFirst) + " are shown";
  if (const auto slowest = timelines.slowest())
    ranks += ", and rank " + std::to_string(*slowest) + ", which computes longest";
  if (!ranks.empty()) ranks += ".";
  const auto first = std::to_string(done_ + profiled_.first),
             last = std::to_string(done_ + profiled_.last);
  return "This is step " + last + ". Profiled, and a little slower for that, " +
         (first == last ? "was it alone" : "were steps " + first + " to " + last) + "." + ranks +
         " Perfetto opens the traces, which have every operator: " +
         std::filesystem::path(trace_of(0)).filename().string() +
         (mesh_.size() > 1 ? " and those of other ranks." : ".");
}

void RunPage::write(torch::nn::Module& model) {
  if (!is_wanted() || mesh_.rank() != 0) return;
  if (history_.steps() == 0) {
    std::cerr << "--report: " << options_.report << " is not written: no step was left to do"
              << std::endl;
    return;
  }
  const auto units = facts_of_units(model, options_, data_mesh_.size());
  auto run = run_of(units);
  run.title = "A training run of " + counted(mesh_.size(), "rank");
  run.facts = settings_in_words(options_, {.ranks = mesh_.size(), .hosts = hosts_.count}, units);
  add_results(run, history_);
  write_output_file({"--report", options_.report},
                    [&](std::ostream& file) { file << run_report::page_of(run); });
  copy_trace_of_rank_0();
}

void RunPage::copy_trace_of_rank_0() const {
  if (options_.profile.empty()) return;
  std::ifstream from(trace_of(0), std::ios::binary);
  if (!from.is_open()) {
    std::cerr << "--profile: " << options_.profile << " is not written: " << trace_of(0)
              << " is not there" << std::endl;
    return;
  }
  write_output_file({"--profile", options_.profile}, [&](std::ostream& to) { to << from.rdbuf(); });
}

}  // namespace programs
