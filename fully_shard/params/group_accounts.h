// The counters that a group updates (fully_shard/counters.h): those of the mesh dimension
// that it shards over, and those of its root.
#pragma once

#include "device_mesh/internal/profiler_range.h"
#include "fully_shard/transport/comm_context.h"
#include "fully_shard/units/root.h"
#include "fully_shard/units/unit.h"

#include <chrono>
#include <memory>
#include <string>

namespace fsdp::internal {

class GroupAccounts {
 public:
  GroupAccounts(std::shared_ptr<CommContext> comm_context, std::shared_ptr<Unit> unit)
      : comm_context_(std::move(comm_context)), unit_(std::move(unit)) {}

  template <class Number>
  void add(Number Counters::*counter, Number amount) const {
    comm_context_->accounts().add(counter, amount);
    unit_->root()->accounts().add(counter, amount);
  }
  void count(int64_t Counters::*counter) const { add(counter, int64_t{1}); }
  const std::string& unit_name() const { return unit_->display_name(); }

 private:
  std::shared_ptr<CommContext> comm_context_;
  std::shared_ptr<Unit> unit_;
};

// Adds the time of a scope to Counters::wait_seconds. Profilers see it, too.
class WaitClock {
 public:
  explicit WaitClock(const GroupAccounts& accounts)
      : accounts_(accounts), range_("wait", accounts.unit_name()), start_(Clock::now()) {}
  ~WaitClock() {
    accounts_.add(&Counters::wait_seconds,
                  std::chrono::duration<double>(Clock::now() - start_).count());
  }
  WaitClock(const WaitClock&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  const GroupAccounts& accounts_;
  const ProfilerRange range_;
  Clock::time_point start_;
};

}  // namespace fsdp::internal
