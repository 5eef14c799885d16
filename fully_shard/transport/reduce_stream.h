// The stream on which gradients are reduced, of one device: rows, sums and so the .grad
// of registry entries are memory of it. So a reduction overlaps with the backward that
// goes on, and waits for none but those that packed its rows. On the CPU it is the host.
// Local.
//
//   { const auto on_it = reduce.allocating(); rows = at::empty(...); }
//   { const CurrentStream on_it(reduce.stream()); send(rows); ... }
//   reduce.await_results();   // by the stream that accumulates them into .grad
#pragma once

#include "fully_shard/transport/stream_set.h"
#include "fully_shard/transport/stream_wait.h"

namespace fsdp::internal {

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

}  // namespace fsdp::internal
