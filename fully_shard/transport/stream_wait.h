// The waits between streams of one device that the library makes itself. Each has a name
// here, and is made in one place by it. What else orders streams is c10d: a collective
// waits for the stream that issues it, and wait() makes the then current stream wait.
// docs/design/streams.md says why each is there.
//
//   make_wait(StreamWait::kUseAfterFill, user, filled);
//
// A wait between a stream and itself, and all waits on the CPU, are nothing. Local.
#pragma once

#include "device_mesh/internal/device_stream.h"

#include <cstdint>

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

}  // namespace fsdp::internal
