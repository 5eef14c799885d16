// Adds the time of a scope to Counters::wait_seconds.
#pragma once

#include "fully_shard/counters.h"

#include <chrono>

namespace fsdp::internal {

class WaitClock {
 public:
  explicit WaitClock(Counters& counters) : counters_(counters), start_(Clock::now()) {}
  ~WaitClock() {
    counters_.wait_seconds += std::chrono::duration<double>(Clock::now() - start_).count();
  }
  WaitClock(const WaitClock&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  Counters& counters_;
  Clock::time_point start_;
};

}  // namespace fsdp::internal
