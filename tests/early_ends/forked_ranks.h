// Ranks as processes that are forked off this one, which is much quicker than to load
// LibTorch for each. This process must not have used LibTorch's threads.
//
//   const auto ends = run_forked({.world = 2, .environment = {{"FSDP_PEER_MEMORY", "off"}}},
//                                [](int64_t rank, Board& board) { ...; return 0; });
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace fsdp::testing {

constexpr int64_t kMostRanks = 8;

// What the ranks and this process share.
struct Board {
  std::array<std::atomic<pid_t>, kMostRanks> pids;
  std::atomic<int64_t> stopper;  // the rank that has stopped the others (SIGSTOP) and ends; -1

  void stop_others_than(int64_t rank);
};

struct RankEnd {
  int exit_code = 0;  // 128 + the signal's number when a signal ended it
  bool hung = false;  // and was killed at the deadline
  std::string output;
};

struct ForkOptions {
  int64_t world = 2;
  std::map<std::string, std::string> environment = {};
  std::chrono::milliseconds deadline = std::chrono::seconds(60);
};

// `body` is what main() does there: its result is the exit code, its exceptions are
// printed and end the process with 1. Ranks that another one has stopped go on when that
// one has ended, or soon. Index = rank.
std::vector<RankEnd> run_forked(const ForkOptions& options,
                                const std::function<int(int64_t rank, Board& board)>& body);

// A process that does nothing but compute, as long as this lives.
class BusyProcess {
 public:
  BusyProcess();
  ~BusyProcess();
  BusyProcess(const BusyProcess&) = delete;
  BusyProcess& operator=(const BusyProcess&) = delete;

 private:
  pid_t pid_;
};

}  // namespace fsdp::testing
