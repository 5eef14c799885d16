#include "device_mesh/peer_memory/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace fsdp::internal {

void sleep_on(const std::atomic<uint32_t>& word, uint32_t seen, std::chrono::milliseconds at_most) {
  const timespec time{.tv_sec = at_most.count() / 1000,
                      .tv_nsec = at_most.count() % 1000 * 1'000'000};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
}

void wake_all(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace fsdp::internal
