// Whether a backward of this rank is open, for threads that are not in it.
//
// On the CPU a backward that throws has been cleaned up when backward() throws. On a
// device autograd's own thread does that, in its own time: the caller may be at the next
// step already. So where a thread that is in no backward finds one open, that failed, and
// the thread waits for its end. Unless another thread really runs one at the same time,
// which is a mistake of the caller's: so the wait has a limit.
//
// begin() and end() by one thread at a time; the others by any.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace fsdp::internal {

class OpenBackward {
 public:
  explicit OpenBackward(int64_t global_rank) : global_rank_(global_rank) {}

  void begin() { is_open_.store(true, std::memory_order_release); }
  void end() noexcept;
  // Open, and the calling thread is in no backward.
  bool has_failed() const;
  // Throws after `limit`.
  void await_end(std::chrono::milliseconds limit = std::chrono::seconds(30));

 private:
  bool is_open() const { return is_open_.load(std::memory_order_acquire); }

  int64_t global_rank_;
  std::atomic<bool> is_open_{false};
  std::mutex mutex_;
  std::condition_variable ended_;
};

}  // namespace fsdp::internal
