#include "fully_shard/transport/reduce_stream.h"

namespace fsdp::internal {

CurrentStream ReduceStream::allocating() {
  readers_.add(DeviceStream::current(device_));
  readers_.are_awaited_by(stream_, StreamWait::kAllocateAfterReads);
  readers_.clear();
  return CurrentStream(stream_);
}

void ReduceStream::await_results() {
  const auto reader = DeviceStream::current(device_);
  make_wait(StreamWait::kPublishAfterReduction, reader, stream_);
  readers_.add(reader);
}

}  // namespace fsdp::internal
