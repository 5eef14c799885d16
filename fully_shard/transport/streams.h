// The waits between streams of one device that the library makes itself. Each has a name
// here, and is made in one place by it. What else orders streams is c10d: a collective
// waits for the stream that issues it, and wait() makes the then current stream wait.
// docs/design/streams.md says why each is there.
//
//   make_wait(StreamWait::kUseAfterFill, user, filled);
//
// A wait between a stream and itself, and all waits on the CPU, are nothing. Local.
#pragma once

#include "device_mesh/internal/accelerator.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace fsdp::internal {

// With what goes wrong where it is left out. (W...: the numbers in
// docs/design/streams.md)
enum class StreamWait : uint8_t {
  // W9. A stream other than the filler's computes with parameters that are not there yet.
  kUseAfterFill,
  // W10. Memory of parameters is used again while another stream still reads them.
  kFreeAfterUse,
  // W3. The next gather is received into rows that another stream still copies from.
  kRowsFreeAfterCopyOut,
  // W14. What a stream writes to parameters is not in the shards that they go to.
  kWriteBackAfterWrites,
  // W1. Shards are gathered that another stream still writes such parameters to.
  kGatherAfterWriteBack,
  // W8. Reduced rows are received into gradients that the optimizer still reads.
  kAllocateAfterReads,
  // W11. What was packed is lost, since the memory was still in use before.
  kPackAfterAllocation,
  // W5. Rows are sent that another stream still packs.
  kReduceAfterPacking,
  // W7. The optimizer reads gradients that are not there yet.
  kPublishAfterReduction,
  // W13. Gradients of an earlier backward are packed before they are there, or their
  // memory is used again before they are packed.
  kPackAccumulated,
};

// `waiter` waits for the event.
void make_wait(StreamWait wait, const DeviceStream& waiter, const DeviceEvent& event);
// `waiter` waits for all that `other` was given so far.
void make_wait(StreamWait wait, const DeviceStream& waiter, const DeviceStream& other);

// Tests: while it lives, no thread makes this wait. They show that each is needed.
class LeaveOut {
 public:
  explicit LeaveOut(StreamWait wait);
  ~LeaveOut();
  LeaveOut(const LeaveOut&) = delete;

 private:
  StreamWait wait_;
};

// Streams that did something that another one has to wait for, each once. Empty on the
// CPU. Local.
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

// The stream on which gradients are reduced, of one device: rows, sums and so the .grad
// of registry entries are memory of it. So a reduction overlaps with the backward that
// goes on, and waits for none but those that packed its rows. On the CPU it is the host.
// Local.
//
//   { const auto on_it = reduce.allocating(); rows = at::empty(...); }
//   { const CurrentStream on_it(reduce.stream()); send(rows); ... }
//   reduce.await_results();   // by the stream that accumulates them into .grad
class ReduceStream {
 public:
  explicit ReduceStream(c10::Device device)
      : device_(device), stream_(DeviceStream::from_pool(device)) {}

  const DeviceStream& stream() const { return stream_; }
  c10::Device device() const { return device_; }
  // Makes it current. What is allocated may be memory that the calling thread's stream
  // read before, or one that awaited results: it waits for them.
  CurrentStream allocating();
  // The calling thread's stream waits for all results so far.
  void await_results();

 private:
  c10::Device device_;
  DeviceStream stream_;
  StreamSet readers_;  // of results
};

// Copies from devices to the host that are queued one behind the other, and one wait of
// the host for all of them. Local.
//
//   CopiesToHost copies;
//   const auto one = copies.add(on_device, CopiesToHost::Memory::kPinned);
//   const auto two = copies.add(another, CopiesToHost::Memory::kPinned);
//   copies.wait();   // what they hold may be read from here on
class CopiesToHost {
 public:
  // Where the host waits for each copy: a device does not write pageable memory by
  // itself.
  enum class Memory { kPinned, kPageable };

  // Copied by the current stream; `tensor` may go when it has been waited for by whoever
  // owns its memory.
  at::Tensor add(const at::Tensor& tensor, Memory memory);
  // Nothing where there are none. At most one wait for each device's stream.
  void wait();

 private:
  StreamSet streams_;  // that copy
};

}  // namespace fsdp::internal
