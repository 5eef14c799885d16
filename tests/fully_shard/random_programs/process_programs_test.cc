// A share of the random programs with ranks as processes.
#include "device_mesh/device_mesh.h"
#include "device_mesh/process_group.h"
#include "tests/fully_shard/random_programs/program_run.h"
#include "tests/fully_shard/random_programs/random_program.h"
#include "tests/support/number_from_environment.h"
#include "tests/support/process_ranks.h"
#include "tests/support/with_environment.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

// One of ten programs runs in processes.
uint64_t number_of_programs() { return number_of_cases("FSDP_PROGRAMS", 120, 500) / 10; }

// Of one world; what empties every group all the time is told process-wide and left out.
std::vector<Program> programs_of_world(int64_t world) {
  const auto first = number_from_environment("FSDP_FIRST_SEED", 1);
  const auto count = number_of_programs();
  std::vector<Program> programs;
  for (uint64_t seed = first; programs.size() < count; ++seed) {
    auto program = generate(seed);
    if (program.world == world && !program.evict) programs.push_back(std::move(program));
  }
  return programs;
}

const ChildCase kRunsPrograms("runs_random_programs", [] {
  const auto world = launch_environment().world_size;
  std::map<int, DeviceMesh> meshes;  // by replicas
  for (const auto& program : programs_of_world(world)) {
    auto found = meshes.find(program.replicas);
    if (found == meshes.end()) {
      const auto mesh = init_device_mesh(c10::kCPU, mesh_shape(program));
      found = meshes.emplace(program.replicas, mesh).first;
    }
    const auto difference = run_program(program, found->second.rank(), found->second);
    TORCH_CHECK(!difference, "seed ", program.seed, ": ", *difference, "\n", to_string(program));
  }
  meshes.clear();
  destroy_process_group();
  return 0;
});

struct ProcessWorld {
  int64_t size;
  const char* peer_memory;  // FSDP_PEER_MEMORY
};

class ProcessPrograms : public ::testing::TestWithParam<ProcessWorld> {};

TEST_P(ProcessPrograms, HaveTheUnshardedNumbers) {
  const WithEnvironment memory("FSDP_PEER_MEMORY", GetParam().peer_memory);
  const auto programs = number_of_programs();
  const std::chrono::seconds deadline(120 + programs);
  const auto ends = run_processes("runs_random_programs", GetParam().size, deadline);
  for (size_t rank = 0; rank < ends.size(); ++rank)
    EXPECT_EQ(ends[rank].exit_code, 0) << "rank " << rank << ": " << ends[rank].output;
}

INSTANTIATE_TEST_SUITE_P(Worlds, ProcessPrograms,
                         ::testing::Values(ProcessWorld{2, "on"}, ProcessWorld{3, "on"},
                                           ProcessWorld{3, "off"}),
                         [](const auto& world) {
                           return std::to_string(world.param.size) + "_ranks_peer_memory_" +
                                  world.param.peer_memory;
                         });

}  // namespace
}  // namespace fsdp::testing
