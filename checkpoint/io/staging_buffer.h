// Host memory for the copies of a save in the background. Kept between saves, so that
// its pages are there and, beside an accelerator, pinned.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace fsdp::internal::checkpoint {

class StagingBuffer {
 public:
  // Room for `bytes` in all, beginning anew. REQUIRES: earlier copies are in use no more.
  void restart(int64_t bytes);
  // A contiguous copy as `dtype`, in the buffer while there is room.
  at::Tensor copy(const at::Tensor& value, c10::ScalarType dtype);

 private:
  at::Tensor memory_;
  int64_t used_ = 0;
};

// What a copy of `bytes` takes in the buffer, with its alignment.
int64_t staged_size(int64_t bytes);

}  // namespace fsdp::internal::checkpoint
