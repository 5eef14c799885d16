#include "device_mesh/peer_memory/process_watch.h"

#include <c10/util/Exception.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace fsdp::internal {

ProcessWatch::ProcessWatch(int64_t pid) : pid_(pid) {
  if (pid == getpid()) return;
  fd_ = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0));
  TORCH_CHECK(fd_ >= 0, "process ", pid, " can not be watched: pidfd_open: ", std::strerror(errno));
}

ProcessWatch::~ProcessWatch() {
  if (fd_ >= 0) close(fd_);
}

bool ProcessWatch::ends_within(std::chrono::milliseconds limit) const {
  pollfd ended{.fd = fd_, .events = POLLIN, .revents = 0};
  return fd_ >= 0 && poll(&ended, 1, static_cast<int>(limit.count())) == 1;
}

}  // namespace fsdp::internal
