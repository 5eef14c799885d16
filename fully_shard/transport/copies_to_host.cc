#include "fully_shard/transport/copies_to_host.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {

at::Tensor CopiesToHost::add(const at::Tensor& tensor, Memory memory) {
  if (memory == Memory::kPageable) return tensor.cpu();
  auto copy = at::empty(tensor.sizes(), tensor.options().device(c10::kCPU).pinned_memory(true));
  copy.copy_(tensor, /*non_blocking=*/true);
  const auto stream = DeviceStream::current(tensor.device());
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end())
    streams_.push_back(stream);
  return copy;
}

void CopiesToHost::wait() {
  for (const auto& stream : std::exchange(streams_, {})) {
    DeviceEvent copied;
    copied.record(stream);
    copied.await_on_host();
  }
}

}  // namespace fsdp::internal
