// Programs on simulated devices, and what is the same as on the CPU: values to the bit.
//
//   const auto expected = run_on_cpu(program, 2);
//   const auto run = run_on_devices(program, 2, simulated::kLate);
//   EXPECT_EQ(faults_of(run, expected), "");
#pragma once

#include "tests/simulated_accelerator/run.h"
#include "tests/simulated_accelerator/world.h"
#include "tests/training_programs/program_rank.h"

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::testing {

struct ProgramRun {
  std::vector<Values> values;  // by rank
  std::vector<int64_t> host_syncs_of_last_step;
  simulated::Report report;
  std::string error;       // of the ranks; empty for none
  bool same_order = true;  // all ranks issued all collectives in one order
};

// Whether all ranks issued all collectives in one order.
bool is_one_order(simulated::World& world);

ProgramRun run_on_devices(const TrainingProgram& program, int64_t ranks,
                          const simulated::Schedule& schedule);

// Of two streams of the program's, one of the library's, and those of groups of a mesh of
// one dimension.
std::vector<simulated::Schedule> schedules_of_programs();

// The values of a run that differ from `expected` in a bit; empty for none.
std::string differing_values(const ProgramRun& run, const std::vector<Values>& expected);

// What is wrong with a run; empty for nothing: values that differ from `expected` in a
// bit, accesses that nothing orders, hosts that did not wait as often in the last step,
// errors.
std::string faults_of(const ProgramRun& run, const std::vector<Values>& expected,
                      int64_t host_syncs = 0);

}  // namespace fsdp::testing
