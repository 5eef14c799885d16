// Models and training programs that nobody thought of, sharded against unsharded.
// FSDP_PROGRAMS and FSDP_FIRST_SEED in the environment choose how many and which.
#include "device_mesh/device_mesh.h"
#include "tests/fully_shard/random_programs/program_features.h"
#include "tests/fully_shard/random_programs/program_run.h"
#include "tests/fully_shard/random_programs/program_shrink.h"
#include "tests/fully_shard/random_programs/program_worlds.h"
#include "tests/support/mesh_in_memory.h"
#include "tests/support/number_from_environment.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

constexpr uint64_t kShare = 120, kAll = 500;

MeshInMemory memory_of(const Program& program) {
  return MeshInMemory(mesh_shape(program), {},
                      {"reduce", "custom all-gather", "custom reduce-scatter"});
}

class Coverage {
 public:
  void count(const Program& program) {
    for (const auto& feature : features()) counts_[feature.name] += feature.has(program) ? 1 : 0;
  }
  void print() const {
    std::printf("%-60s | programs that had it\n", "feature");
    for (const auto& feature : features()) {
      std::printf("%-60s | %lld\n", feature.name.c_str(),
                  static_cast<long long>(counts_.at(feature.name)));
    }
  }
  void expect_all() const {
    for (const auto& [name, count] : counts_) EXPECT_GT(count, 0) << name << " was in no program";
  }

 private:
  std::map<std::string, int64_t> counts_;
};

TEST(RandomPrograms, HaveTheUnshardedNumbers) {
  const auto first = number_from_environment("FSDP_FIRST_SEED", 1);
  const auto count = number_of_cases("FSDP_PROGRAMS", kShare, kAll);
  Coverage coverage;
  std::vector<Program> programs;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    programs.push_back(generate(seed));
    coverage.count(programs.back());
  }
  expect_no_difference(
      programs, {.memory = memory_of, .run = [](const Program& program, const DeviceMesh& mesh) {
                   return run_program(program, mesh.rank(), mesh);
                 }});
  coverage.print();
  if (count >= kAll) coverage.expect_all();
}

TEST(RandomPrograms, ShrinkToTheFewPartsThatFail) {
  const auto has_clip = [](const Program& program) {
    for (const auto& action : program.actions) {
      if (action.kind == ActionKind::kClip) return true;
    }
    return false;
  };
  const auto checkpoints = [](const Program& program) {
    int count = 0;
    for_each_node(program.root, [&count](const Node& node) { count += node.checkpoint ? 1 : 0; });
    return count;
  };
  const auto both = [&](const Program& program) {
    return has_clip(program) && checkpoints(program) > 0;
  };
  int shrunk = 0;
  for (uint64_t seed = 1; seed < 200; ++seed) {
    const auto program = generate(seed);
    if (!both(program)) continue;
    const auto small = shrink(program, both);
    EXPECT_EQ(small.actions.size(), 1u) << to_string(small);
    EXPECT_EQ(checkpoints(small), 1) << to_string(small);
    int params = 0;
    for_each_node(small.root,
                  [&params](const Node& node) { params += static_cast<int>(node.params.size()); });
    EXPECT_EQ(params, 1) << to_string(small);  // the anchor
    ++shrunk;
  }
  EXPECT_GT(shrunk, 0);
}

}  // namespace
}  // namespace fsdp::testing
