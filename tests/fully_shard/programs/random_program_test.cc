// Models and training programs that nobody thought of, sharded against unsharded.
// FSDP_PROGRAMS and FSDP_FIRST_SEED in the environment choose how many and which.
#include "device_mesh/device_mesh.h"
#include "on_demand/on_demand_storage.h"
#include "tests/fully_shard/programs/program_features.h"
#include "tests/fully_shard/programs/program_run.h"
#include "tests/fully_shard/programs/program_shrink.h"
#include "tests/fully_shard/write_checks.h"
#include "tests/support/errors.h"
#include "tests/support/mesh_in_memory.h"
#include "tests/support/number_from_environment.h"
#include "tests/support/thread_ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

constexpr uint64_t kDefaultPrograms = 500;
constexpr size_t kProgramsPerWorld = 50;
constexpr size_t kFailuresShrunk = 3;

MeshInMemory memory_of(const Program& program) {
  std::vector<int64_t> shape{shards_of(program)};
  if (program.replicas > 1) shape.insert(shape.begin(), program.replicas);
  return MeshInMemory(shape, {}, {"reduce", "custom all-gather", "custom reduce-scatter"});
}

struct Outcome {
  size_t ended = 0;  // programs that this world ran: all, unless an exception broke it
  std::map<size_t, std::string> failures;  // by position
};

// Runs programs of one world and mode one after another on one world of thread ranks.
Outcome run_in_one_world(const std::vector<Program>& programs) {
  Outcome outcome{.ended = programs.size()};
  std::mutex mutex;
  const auto fail = [&](size_t position, int64_t rank, const std::string& text) {
    // That another rank has gone explains least.
    auto& told = outcome.failures[position];
    if (told.empty() || told.find("a rank left the group") != std::string::npos)
      told = "rank " + std::to_string(rank) + ", " + text;
  };
  const MeshInMemory memory = memory_of(programs.front());
  const auto body = [&](int64_t rank) {
    const auto mesh = memory.join();
    for (size_t i = 0; i < programs.size(); ++i) {
      try {
        const auto difference = run_program(programs[i], rank, mesh);
        std::lock_guard lock(mutex);
        if (difference) fail(i, rank, *difference);
      } catch (const std::exception& error) {
        std::lock_guard lock(mutex);
        outcome.ended = std::min(outcome.ended, i + 1);
        fail(i, rank, text_of(error));
        return;  // the other ranks fail alike, or because this one is gone
      }
    }
  };
  // In the one mode every touch does all it can, in the other as little.
  internal::set_evict_after_every_operator(programs.front().evict);
  const WriteChecks checks(programs.front().evict);
  run_ranks(memory.size(), body, std::chrono::minutes(5));
  internal::set_evict_after_every_operator(false);
  outcome.failures.erase(outcome.failures.lower_bound(outcome.ended), outcome.failures.end());
  return outcome;
}

using Failures = std::vector<std::pair<Program, std::string>>;

// A fresh world after every program that broke one.
void run_all(std::vector<Program> programs, Failures& failures) {
  while (!programs.empty()) {
    const auto count = static_cast<int64_t>(std::min(programs.size(), kProgramsPerWorld));
    const auto outcome = run_in_one_world({programs.begin(), programs.begin() + count});
    for (const auto& [position, text] : outcome.failures)
      failures.emplace_back(programs[position], text);
    programs.erase(programs.begin(), programs.begin() + static_cast<int64_t>(outcome.ended));
  }
}

// The first line of a failure without its numbers: shrinking must not drift from one
// failure to another.
std::string kind_of(const std::string& failure) {
  auto kind = failure.substr(0, std::min(failure.find('\n'), size_t{60}));
  std::erase_if(kind, [](char c) { return c >= '0' && c <= '9'; });
  return kind;
}

std::string failure_of(const Program& program) {
  const auto outcome = run_in_one_world({program});
  return outcome.failures.empty() ? "" : outcome.failures.begin()->second;
}

void report(const Failures& failures) {
  for (size_t i = 0; i < failures.size(); ++i) {
    const auto& [program, text] = failures[i];
    if (i >= kFailuresShrunk) {
      ADD_FAILURE() << "seed " << program.seed << ": " << text;
      continue;
    }
    const auto small = shrink(program, [kind = kind_of(text)](const Program& p) {
      return kind_of(failure_of(p)) == kind;
    });
    ADD_FAILURE() << "seed " << program.seed << ": " << text << "\nshrunk to " << to_string(small)
                  << failure_of(small);
  }
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
  const auto count = number_from_environment("FSDP_PROGRAMS", kDefaultPrograms);
  Coverage coverage;
  std::map<std::tuple<int, int, bool>, std::vector<Program>> by_world;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    auto program = generate(seed);
    coverage.count(program);
    by_world[{program.world, program.replicas, program.evict}].push_back(std::move(program));
  }
  Failures failures;
  for (auto& [world, programs] : by_world) run_all(std::move(programs), failures);
  report(failures);
  coverage.print();
  if (count >= kDefaultPrograms) coverage.expect_all();
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
