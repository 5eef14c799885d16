// Ranks as real processes, for tests of death and time-outs. The test program starts
// itself again once per rank, with the environment a launcher would set, and runs a named
// case there instead of its tests.
//
//   const ChildCase kDies("rank_one_dies", [] { fsdp::init_process_group(); ...; return 0; });
//
//   TEST(Failures, DeadRankEndsTheOthers) {
//     auto ends = run_processes("rank_one_dies", 2, std::chrono::seconds(20));
//     EXPECT_NE(ends[0].exit_code, 0) << ends[0].output;
//   }
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::testing {

// Registers `body` under `name`; its result is the child's exit code, and an exception
// prints its text and exits with 1. Only for objects of static storage duration.
class ChildCase {
 public:
  ChildCase(std::string name, std::function<int()> body);
};

// Runs the case that the arguments select with --child=<name>; nullopt when they select
// none. For the main function.
std::optional<int> run_selected_child(int argc, char** argv);

struct ProcessEnd {
  int exit_code = 0;  // 128 + the signal's number when a signal ended it
  bool killed_at_deadline = false;
  std::string output;  // stdout and stderr, interleaved
};

// Starts `world_size` processes with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
// MASTER_PORT (a free port) and `environment` on top, waits for all, and kills those that
// still run at the deadline. Index = rank.
std::vector<ProcessEnd> run_processes(const std::string& child, int64_t world_size,
                                      std::chrono::milliseconds deadline,
                                      const std::map<std::string, std::string>& environment = {});

}  // namespace fsdp::testing
