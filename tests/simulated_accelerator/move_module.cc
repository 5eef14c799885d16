#include "tests/simulated_accelerator/move_module.h"

#include <ATen/core/grad_mode.h>

namespace fsdp::testing::simulated {

void move_to(at::Tensor& tensor, c10::Device device) {
  if (tensor.device() == device) return;
  tensor.mutable_grad().reset();
  const auto moved = tensor.detach().to(device);
  tensor.unsafeGetTensorImpl()->shallow_copy_from(moved.getIntrusivePtr());
}

void move_to(torch::nn::Module& module, c10::Device device) {
  const at::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) move_to(parameter, device);
  for (auto& buffer : module.buffers()) move_to(buffer, device);
}

}  // namespace fsdp::testing::simulated
