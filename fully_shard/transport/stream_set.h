// Streams that did something that another one has to wait for, each once. Empty on the
// CPU. Local.
#pragma once

#include "fully_shard/transport/stream_wait.h"

#include <algorithm>
#include <vector>

namespace fsdp::internal {

class StreamSet {
 public:
  // False where it was there, and for the host.
  bool add(const DeviceStream& stream) {
    if (stream.is_host()) return false;
    if (std::find(streams_.begin(), streams_.end(), stream) != streams_.end()) return false;
    streams_.push_back(stream);
    return true;
  }
  // `waiter` waits for all that each was given so far.
  void are_awaited_by(const DeviceStream& waiter, StreamWait wait) const {
    for (const auto& stream : streams_) make_wait(wait, waiter, stream);
  }
  // Each waits for all that `other` was given so far.
  void wait_for(const DeviceStream& other, StreamWait wait) const {
    for (const auto& stream : streams_) make_wait(wait, stream, other);
  }
  // The host waits for all that each was given so far.
  void await_on_host() const {
    for (const auto& stream : streams_) {
      DeviceEvent given;
      given.record(stream);
      given.await_on_host();
    }
  }
  void clear() { streams_.clear(); }

 private:
  std::vector<DeviceStream> streams_;
};

}  // namespace fsdp::internal
