#include "tests/fully_shard/random_programs/program_worlds.h"

#include "tests/fully_shard/random_programs/program_failures.h"
#include "tests/fully_shard/random_programs/program_mode.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

namespace fsdp::testing {
namespace {

constexpr size_t kProgramsPerWorld = 50;

struct Outcome {
  size_t ended = 0;  // programs that this world ran: all, unless an exception broke it
  std::map<size_t, std::string> failures;  // by position
};

// Runs programs of one world and mode one after another on one world of thread ranks.
Outcome run_in_one_world(const std::vector<Program>& programs, const ProgramWorlds& worlds) {
  Outcome outcome{.ended = programs.size()};
  std::mutex mutex;
  const auto fail = [&](size_t position, int64_t rank, const std::string& text) {
    // That another rank has gone explains least.
    auto& told = outcome.failures[position];
    if (told.empty() || told.find("a rank left the group") != std::string::npos)
      told = "rank " + std::to_string(rank) + ", " + text;
  };
  const MeshInMemory memory = worlds.memory(programs.front());
  const auto body = [&](int64_t rank) {
    const bool over_test_backend = programs.front().transport == ProgramTransport::kTestBackend;
    const auto mesh = over_test_backend ? memory.join() : memory.join_over_c10d();
    for (size_t i = 0; i < programs.size(); ++i) {
      try {
        const auto difference = worlds.run(programs[i], mesh);
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
  const ProgramMode mode(programs.front());
  run_ranks(memory.size(), body, std::chrono::minutes(5));
  outcome.failures.erase(outcome.failures.lower_bound(outcome.ended), outcome.failures.end());
  return outcome;
}

// A fresh world after every program that broke one.
void run_all(std::vector<Program> programs, const ProgramWorlds& worlds,
             ProgramFailures& failures) {
  while (!programs.empty()) {
    const auto count = static_cast<int64_t>(std::min(programs.size(), kProgramsPerWorld));
    const auto outcome = run_in_one_world({programs.begin(), programs.begin() + count}, worlds);
    for (const auto& [position, text] : outcome.failures)
      failures.emplace_back(programs[position], text);
    programs.erase(programs.begin(), programs.begin() + static_cast<int64_t>(outcome.ended));
  }
}

std::string failure_of(const Program& program, const ProgramWorlds& worlds) {
  const auto outcome = run_in_one_world({program}, worlds);
  return outcome.failures.empty() ? "" : outcome.failures.begin()->second;
}

// Programs of one world and mode have the same.
auto world_of(const Program& program) {
  return std::tuple(program.sharded, program.world, program.replicas, program.tensor_ranks,
                    program.transport, program.evict);
}

}  // namespace

void expect_no_difference(const std::vector<Program>& programs, const ProgramWorlds& worlds) {
  std::map<decltype(world_of({})), std::vector<Program>> by_world;
  for (const Program& program : programs) by_world[world_of(program)].push_back(program);
  ProgramFailures failures;
  for (auto& [world, of_world] : by_world) run_all(std::move(of_world), worlds, failures);
  tell_failures(failures, [&](const Program& program) { return failure_of(program, worlds); });
}

}  // namespace fsdp::testing
