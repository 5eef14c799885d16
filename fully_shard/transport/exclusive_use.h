// Group state is driven by one thread at a time: the user's in forward, autograd's in
// backward. Two at once would corrupt it and reorder collectives, so a second thread gets
// an error.
#pragma once

#include <c10/util/Exception.h>

#include <atomic>
#include <thread>

namespace fsdp::internal {

// What one thread at a time may hold; a thread may hold it several times.
using User = std::atomic<std::thread::id>;

class ExclusiveUse {
 public:
  explicit ExclusiveUse(User& user) : user_(user) {
    auto holder = std::thread::id();
    entered_ = user_.compare_exchange_strong(holder, std::this_thread::get_id(),
                                             std::memory_order_acquire);
    TORCH_CHECK(entered_ || holder == std::this_thread::get_id(),
                "two threads use the sharded parameters of one rank at the same time. Let one "
                "thread at a time run forward "
                "and backward of modules that share a mesh");
  }
  ~ExclusiveUse() {
    if (entered_) user_.store(std::thread::id(), std::memory_order_release);
  }
  ExclusiveUse(const ExclusiveUse&) = delete;

 private:
  User& user_;
  bool entered_;
};

}  // namespace fsdp::internal
