#include "device_mesh/collectives/backend/slow_wait.h"

#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

namespace fsdp::internal {

// One thread of the process looks at all waits, ten times per threshold. Leaked: it
// outlives static destruction.
class SlowWaitWatch {
 public:
  static SlowWaitWatch& get() {
    static auto& instance = *new SlowWaitWatch();
    return instance;
  }

  void enter(SlowWait& wait) {
    const std::lock_guard lock(mutex_);
    waits_.insert(&wait);
    if (!std::exchange(running_, true)) std::thread([this] { run(); }).detach();
  }
  void leave(SlowWait& wait) {
    const std::lock_guard lock(mutex_);
    waits_.erase(&wait);
  }
  void set_threshold(std::chrono::milliseconds threshold) {
    const std::lock_guard lock(mutex_);
    threshold_ = threshold;
    changed_.notify_all();
  }

 private:
  [[noreturn]] void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait_for(lock, threshold_ / 10);
      const auto now = std::chrono::steady_clock::now();
      for (auto* wait : waits_) {
        if (wait->look_ && now - wait->begin_ >= threshold_ / 10) wait->look_();
        if (wait->told_ || now - wait->begin_ < threshold_) continue;
        wait->told_ = true;
        const auto seconds = std::chrono::duration<double>(now - wait->begin_).count();
        std::fprintf(stderr, "fsdp: after %.0f s %s\n", seconds, wait->describe_().c_str());
        std::fflush(stderr);
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<SlowWait*> waits_;
  std::chrono::milliseconds threshold_ = std::chrono::seconds(30);
  bool running_ = false;
};

SlowWait::SlowWait(std::function<std::string()> describe, std::function<void()> look)
    : describe_(std::move(describe)),
      look_(std::move(look)),
      begin_(std::chrono::steady_clock::now()) {
  SlowWaitWatch::get().enter(*this);
}

SlowWait::~SlowWait() { SlowWaitWatch::get().leave(*this); }

void set_slow_wait_threshold(std::chrono::milliseconds threshold) {
  SlowWaitWatch::get().set_threshold(threshold);
}

}  // namespace fsdp::internal
