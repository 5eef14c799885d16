// The end of a save on a thread of its own. Each rank has at most one at a time, and what
// goes wrong in it is thrown by wait(), or else by the rank's next save, or else by
// destroy_process_group(), which waits for it.
#pragma once

#include "checkpoint/io/staging_buffer.h"

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace fsdp::internal::checkpoint {

class BackgroundSave {
 public:
  // Starts `work` as the calling rank's save in the background. REQUIRES:
  // finish_previous().
  static std::shared_ptr<BackgroundSave> start(std::function<void()> work);
  // Waits for the calling rank's save in the background, and throws what went wrong in it
  // unless wait() has.
  static void finish_previous();
  // The calling rank's, kept from save to save. REQUIRES: finish_previous() before its
  // use.
  static StagingBuffer& staging();

  explicit BackgroundSave(std::function<void()> work);
  BackgroundSave(const BackgroundSave&) = delete;
  ~BackgroundSave();

  bool is_done() const { return done_; }
  void wait_without_throwing();
  void wait();

 private:
  // Waits, and throws what nobody was told yet.
  void finish();
  std::exception_ptr take_unreported();

  std::mutex mutex_;  // of what follows but done_
  std::exception_ptr error_;
  bool reported_ = false;
  std::atomic<bool> done_ = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace fsdp::internal::checkpoint
