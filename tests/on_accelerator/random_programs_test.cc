// Models and training programs that nobody thought of, on a device: the bits of the CPU
// over Gloo in a late and in an eager schedule, no access that nothing orders, and one
// order of collectives on all ranks. FSDP_DEVICE_PROGRAMS and FSDP_FIRST_SEED in the
// environment choose how many and which.
#include "device_mesh/device_mesh.h"
#include "dtensor/dtensor.h"
#include "tests/fully_shard/random_programs/program_failures.h"
#include "tests/fully_shard/random_programs/program_mode.h"
#include "tests/fully_shard/random_programs/sharded_run.h"
#include "tests/fully_shard/random_programs/side_comparison.h"
#include "tests/on_accelerator/device_exclusions.h"
#include "tests/on_accelerator/program.h"
#include "tests/simulated_accelerator/install.h"
#include "tests/simulated_accelerator/move_module.h"
#include "tests/simulated_accelerator/run.h"
#include "tests/simulated_accelerator/world.h"
#include "tests/support/number_from_environment.h"
#include "tests/support/thread_ranks.h"

#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <cstdio>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

constexpr uint64_t kShare = 30, kAll = 100;
constexpr uint64_t kStreamsOfARandomProgram = 8;

using KeptByRank = std::vector<std::vector<KeptValue>>;

KeptByRank run_over_gloo(const Program& program) {
  KeptByRank kept(static_cast<size_t>(program.world));
  run_ranks(program.world, [&](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, mesh_shape(program));
    kept[static_cast<size_t>(rank)] = run_sharded(program, mesh);
  });
  return kept;
}

// What no unit has.
void move_the_rest(const RandomModel& model) {
  for (auto& parameter : model.module().parameters()) {
    if (!is_dtensor(parameter)) simulated::move_to(parameter, model.device);
  }
  for (auto& buffer : model.module().buffers()) simulated::move_to(buffer, model.device);
}

KeptByRank run_over_devices(const Program& program,
                            const std::shared_ptr<simulated::World>& world) {
  KeptByRank kept(static_cast<size_t>(program.world));
  simulated::run_ranks_on_devices(program.world, world, [&](int64_t rank) {
    const auto mesh = init_device_mesh(simulated::kDeviceType, mesh_shape(program));
    kept[static_cast<size_t>(rank)] = run_sharded(program, mesh, move_the_rest);
  });
  return kept;
}

// The first difference, or nothing.
std::string difference_of(const KeptByRank& actual, const KeptByRank& expected) {
  std::ostringstream text;
  for (size_t rank = 0; rank < expected.size(); ++rank) {
    const auto &mine = actual[rank], &wanted = expected[rank];
    if (mine.size() != wanted.size()) return "another number of values";
    for (size_t i = 0; i < wanted.size(); ++i) {
      const auto &a = mine[i].value, &b = wanted[i].value;
      if (a.defined() && b.defined() ? is_same(a, b) : a.defined() == b.defined()) continue;
      text << wanted[i].what << " is\n" << a << "\nbut on the CPU\n" << b << "\non rank " << rank;
      return text.str();
    }
  }
  return "";
}

std::string faults_in(const Program& program, const simulated::Schedule& schedule,
                      const KeptByRank& expected) {
  const auto world = std::make_shared<simulated::World>();
  KeptByRank kept;
  std::string error;
  const auto report = simulated::run_in({.schedule = schedule}, [&] {
    try {
      kept = run_over_devices(program, world);
    } catch (const std::exception& thrown) {
      error = thrown.what();
    }
  });
  const auto where = "\nin schedule " + to_string(schedule);
  if (!error.empty()) return error.substr(0, 3000) + where;
  if (!report.unordered.empty()) return "unordered: " + *report.unordered.begin() + where;
  if (!report.failures.empty()) return "failure: " + report.failures.front() + where;
  if (!is_one_order(*world)) return "ranks issued collectives in different orders" + where;
  const auto difference = difference_of(kept, expected);
  return difference.empty() ? "" : difference + where;
}

// What is wrong with a program on devices; empty for nothing.
std::string faults_of_program(const Program& program) {
  const ProgramMode mode(program);
  const auto expected = run_over_gloo(program);
  const auto stream = static_cast<int>(program.seed % kStreamsOfARandomProgram);
  const auto faults = faults_in(program, simulated::kLate, expected);
  return faults.empty() ? faults_in(program, simulated::eager(stream), expected) : faults;
}

// How many programs had what is left out.
void print_exclusions(uint64_t first, uint64_t count) {
  for (const auto& exclusion : device_exclusions()) {
    uint64_t changed = 0;
    for (uint64_t seed = first; seed < first + count; ++seed) {
      const auto whole = generate(seed);
      auto program = whole;
      exclusion.leave_out(program);
      changed += to_string(program) == to_string(whole) ? 0 : 1;
    }
    std::printf("left out of %llu programs: %s, since %s\n",
                static_cast<unsigned long long>(changed), exclusion.feature.c_str(),
                exclusion.reason.c_str());
  }
}

TEST(RandomProgramsOnDevices, HaveTheBitsOfCpu) {
  simulated::install();
  const auto first = number_from_environment("FSDP_FIRST_SEED", 1);
  const auto count = number_of_cases("FSDP_DEVICE_PROGRAMS", kShare, kAll);
  ProgramFailures failures;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const auto program = generate_for_devices(seed);
    const auto faults = faults_of_program(program);
    if (!faults.empty()) failures.emplace_back(program, faults);
  }
  print_exclusions(first, count);
  tell_failures(failures, faults_of_program);
}

}  // namespace
}  // namespace fsdp::testing
