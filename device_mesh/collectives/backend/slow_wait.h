// Tells stderr, once, that a wait for other ranks takes unusually long: for which
// operation and for which ranks. A scope around the wait; costs a lock and no system
// call.
//
//   SlowWait slow([&] { return "rank 0 waits for the all-gather of unit 'l0' by rank 1"; });
//
// A wait that the backend may forget to end can be looked at meanwhile, every few
// seconds.
#pragma once

#include <chrono>
#include <functional>
#include <string>

namespace fsdp::internal {

class SlowWait {
 public:
  // Both are called from another thread while this lives: `describe` once, when the wait
  // is unusually long, and `look` every tenth of that time (3 s), if it is given.
  explicit SlowWait(std::function<std::string()> describe, std::function<void()> look = {});
  ~SlowWait();
  SlowWait(const SlowWait&) = delete;
  SlowWait& operator=(const SlowWait&) = delete;

 private:
  friend class SlowWaitWatch;
  std::function<std::string()> describe_;
  std::function<void()> look_;
  std::chrono::steady_clock::time_point begin_;
  bool told_ = false;
};

// How long is unusual: 30 s unless set. For tests.
void set_slow_wait_threshold(std::chrono::milliseconds threshold);

}  // namespace fsdp::internal
