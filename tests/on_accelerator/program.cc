#include "tests/on_accelerator/program.h"

#include <algorithm>
#include <memory>
#include <sstream>

namespace fsdp::testing {
namespace {

using simulated::World;

void run_rank(const TrainingProgram& program, const DeviceMesh& mesh, ProgramRun& run) {
  const auto device = local_device(mesh);
  ProgramRank rank(
      mesh, {.host_syncs = [=] { return simulated::counters_now(device).host_syncs.total; }});
  program(rank);
  run.values[static_cast<size_t>(rank.rank())] = rank.values();
  run.host_syncs_of_last_step[static_cast<size_t>(rank.rank())] = rank.host_syncs_of_last_step();
}

}  // namespace

// But for how many bytes they are of: ranks of different groups may have more or fewer.
bool is_one_order(World& world) {
  const auto issued = world.issued();
  const auto is_same = [](const std::string& one, const std::string& other) {
    return one.substr(0, one.rfind(" of ")) == other.substr(0, other.rfind(" of "));
  };
  for (const auto& [rank, operations] : issued) {
    const auto& first = issued.begin()->second;
    if (!std::equal(operations.begin(), operations.end(), first.begin(), first.end(), is_same))
      return false;
  }
  return true;
}

ProgramRun run_on_devices(const TrainingProgram& program, int64_t ranks,
                          const simulated::Schedule& schedule) {
  const auto count = static_cast<size_t>(ranks);
  ProgramRun run{.values = std::vector<Values>(count),
                 .host_syncs_of_last_step = std::vector<int64_t>(count)};
  const auto world = std::make_shared<World>();
  const auto body = [&](int64_t) {
    run_rank(program, init_device_mesh(simulated::kDeviceType, {ranks}), run);
  };
  run.report = simulated::run_in({.schedule = schedule}, [&] {
    try {
      simulated::run_ranks_on_devices(ranks, world, body);
    } catch (const std::exception& error) {
      run.error = error.what();
    }
  });
  run.same_order = is_one_order(*world);
  return run;
}

std::vector<simulated::Schedule> schedules_of_programs() { return simulated::schedules(5); }

std::string differing_values(const ProgramRun& run, const std::vector<Values>& expected) {
  std::ostringstream text;
  for (size_t rank = 0; rank < expected.size(); ++rank) {
    const auto &actual = run.values[rank], &wanted = expected[rank];
    if (actual.size() != wanted.size()) return "another number of values";
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (!actual[i].equal(wanted[i])) text << "value " << i << " of rank " << rank << "\n";
    }
  }
  return text.str();
}

std::string faults_of(const ProgramRun& run, const std::vector<Values>& expected,
                      int64_t host_syncs) {
  if (!run.error.empty()) return run.error.substr(0, 2000);
  std::ostringstream faults;
  faults << differing_values(run, expected);
  for (size_t rank = 0; rank < expected.size(); ++rank) {
    const auto syncs = run.host_syncs_of_last_step[rank];
    if (syncs != host_syncs) faults << syncs << " host syncs on rank " << rank << "\n";
  }
  for (const auto& pair : run.report.unordered) faults << "unordered: " << pair << "\n";
  for (const auto& failure : run.report.failures) faults << "failure: " << failure << "\n";
  if (!run.same_order) faults << "ranks issued collectives in different orders\n";
  return faults.str();
}

}  // namespace fsdp::testing
