#include "checkpoint/io/staging_buffer.h"

#include "device_mesh/internal/device_types.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

namespace fsdp::internal::checkpoint {
namespace {

constexpr int64_t kAlignment = 64;

}  // namespace

int64_t staged_size(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

void StagingBuffer::restart(int64_t bytes) {
  used_ = 0;
  if (memory_.defined() && memory_.numel() >= bytes) return;
  // First: both would be too much.
  memory_ = at::Tensor();
  // Copies from an accelerator are faster then.
  const bool pinned = visible_accelerator().has_value();
  memory_ = at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(pinned));
}

at::Tensor StagingBuffer::copy(const at::Tensor& value, c10::ScalarType dtype) {
  const c10::NoGradGuard no_grad;
  const int64_t bytes = value.numel() * static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t size = staged_size(bytes);
  at::Tensor target;
  if (bytes == 0 || !memory_.defined() || used_ + size > memory_.numel()) {
    target = at::empty(value.sizes(), at::TensorOptions(dtype));
  } else {
    target = memory_.narrow(0, used_, bytes).view(dtype).view(value.sizes());
    used_ += size;
  }
  target.copy_(value.detach());
  return target;
}

}  // namespace fsdp::internal::checkpoint
