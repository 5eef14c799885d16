// Whether a process of this host has ended, killed or not, even while nobody has waited
// for it: by a pidfd, which stays with that process when its number is used again.
#pragma once

#include <chrono>
#include <cstdint>

namespace fsdp::internal {

class ProcessWatch {
 public:
  // Of this process itself there is nothing to watch. Throws c10::Error where there is no
  // such process.
  explicit ProcessWatch(int64_t pid);
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  int64_t pid() const { return pid_; }
  bool has_ended() const { return ends_within(std::chrono::milliseconds(0)); }  // a system call
  // Waits for it.
  bool ends_within(std::chrono::milliseconds limit) const;

 private:
  int64_t pid_;
  int fd_ = -1;
};

}  // namespace fsdp::internal
