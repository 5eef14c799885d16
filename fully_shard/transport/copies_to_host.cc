#include "fully_shard/transport/copies_to_host.h"

#include <ATen/ops/empty.h>

namespace fsdp::internal {

at::Tensor CopiesToHost::add(const at::Tensor& tensor, Memory memory) {
  if (memory == Memory::kPageable) return tensor.cpu();
  auto copy = at::empty(tensor.sizes(), tensor.options().device(c10::kCPU).pinned_memory(true));
  copy.copy_(tensor, /*non_blocking=*/true);
  streams_.add(DeviceStream::current(tensor.device()));
  return copy;
}

void CopiesToHost::wait() {
  streams_.await_on_host();
  streams_.clear();
}

}  // namespace fsdp::internal
