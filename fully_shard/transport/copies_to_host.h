// Copies from devices to the host that are queued one behind the other, and one wait of
// the host for all of them. Local.
//
//   CopiesToHost copies;
//   const auto one = copies.add(on_device, CopiesToHost::Memory::kPinned);
//   const auto two = copies.add(another, CopiesToHost::Memory::kPinned);
//   copies.wait();   // what they hold may be read from here on
#pragma once

#include "fully_shard/transport/stream_set.h"

#include <ATen/core/Tensor.h>

namespace fsdp::internal {

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
