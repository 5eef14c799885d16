// Tells stderr, once, that a wait for other ranks takes unusually long: for which
// operation and for which ranks. A scope around the wait; costs a lock and no system
// call.
//
//   SlowWait slow([&] { return "rank 0 waits for the all-gather of unit 'l0' by rank 1"; });
#pragma once

#include <chrono>
#include <functional>
#include <string>

namespace fsdp::internal {

class SlowWait {
 public:
  // `describe` is called from another thread, while this lives, if it lives long.
  explicit SlowWait(std::function<std::string()> describe);
  ~SlowWait();
  SlowWait(const SlowWait&) = delete;
  SlowWait& operator=(const SlowWait&) = delete;

 private:
  friend class SlowWaitWatch;
  std::function<std::string()> describe_;
  std::chrono::steady_clock::time_point begin_;
  bool told_ = false;
};

// How long is unusual: 30 s unless set. For tests.
void set_slow_wait_threshold(std::chrono::milliseconds threshold);

}  // namespace fsdp::internal
