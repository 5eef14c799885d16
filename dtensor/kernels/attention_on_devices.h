// scaled_dot_product_attention of DTensors on devices other than the CPU. LibTorch would
// choose a fused kernel, by the device and the global shapes, and only that of the CPU
// has strategies (dtensor/ops/attention.h). So attention is taken apart there, into the
// operators of PyTorch's math backend. Plain tensors, and so models without tensor
// parallelism, keep the fused kernels.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

namespace fsdp::internal {

// Registers it under kFirstKey: the operator is a composite, which autograd takes apart
// before an operator of its reaches kDTensorKey. Appends the registration.
void register_attention_on_devices(std::vector<c10::RegistrationHandleRAII>& handles);

}  // namespace fsdp::internal
