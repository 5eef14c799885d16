// Memory of one stream that other streams use too. The allocator gives it out again on
// its own stream without asking who else is at it, so the owner waits for the others
// before it goes.
//
//   rows = at::empty(...);
//   memory.ready(owner);                             // bytes are there for others, from here on
//   memory.use(DeviceStream::current(device));       // by whoever reads or writes them
//   memory.free();                                   // the owner waits
//   rows.reset();
//
// On the CPU all of it does nothing. Local.
#pragma once

#include "fully_shard/transport/stream_set.h"
#include "fully_shard/transport/stream_wait.h"

#include <optional>

namespace fsdp::internal {

class StreamMemory {
 public:
  StreamMemory(StreamWait before_use, StreamWait before_free)
      : before_use_(before_use), before_free_(before_free) {}

  // Has belonged to `owner` since it was allocated, and is ready after what that was
  // given so far.
  void ready(const DeviceStream& owner) {
    owner_ = owner;
    ready_.record(owner);
  }
  // After it is ready.
  const DeviceEvent& when_ready() const { return ready_; }
  // `user` waits until it is ready, the first time. REQUIRES: ready.
  void use(const DeviceStream& user) {
    if (user != *owner_ && users_.add(user)) make_wait(before_use_, user, ready_);
  }
  // The same, and `user` waits for what all others were given so far: they may have
  // written it.
  void use_after_others(const DeviceStream& user, StreamWait wait) {
    use(user);
    make_wait(wait, user, *owner_);
    users_.are_awaited_by(user, wait);
  }
  // The owner waits for all users as far as they are by now. Nothing where it is not
  // ready.
  void free() {
    if (!owner_) return;
    users_.are_awaited_by(*owner_, before_free_);
    users_.clear();
    owner_.reset();
  }

 private:
  StreamWait before_use_, before_free_;
  std::optional<DeviceStream> owner_;
  DeviceEvent ready_;
  StreamSet users_;
};

}  // namespace fsdp::internal
