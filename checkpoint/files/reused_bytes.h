// Memory that one use after another has: allocators do not always give back what many
// buffers of different sizes took in turn.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>

namespace fsdp::internal::checkpoint {

class ReusedBytes {
 public:
  // uint8 [bytes], not initialised; overwrites what was given before.
  at::Tensor take(int64_t bytes, c10::Device device) {
    if (!memory_.defined() || memory_.numel() < bytes || memory_.device() != device) {
      memory_.reset();  // before the larger one is made
      memory_ = at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
    }
    return memory_.narrow(0, 0, bytes);
  }

 private:
  at::Tensor memory_;
};

}  // namespace fsdp::internal::checkpoint
