// Composite operators of DTensors on devices other than the CPU, which LibTorch would
// take apart into kernels that it chooses by the device, cuDNN's and other fused ones:
// these have no strategies, and cuDNN's batch norm writes its running statistics without
// saying so in its schema. Here they are taken apart into the operators that have:
//
//   scaled_dot_product_attention   the operators of PyTorch's math backend
//   batch_norm                     native_batch_norm (dtensor/ops/batch_norm.cc)
//
// Plain tensors, and so models without tensor parallelism, keep the fused kernels.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

namespace fsdp::internal {

// Registers them under kFirstKey: autograd takes composites apart before an operator of
// theirs reaches kDTensorKey. Appends the registrations.
void register_composites_on_devices(std::vector<c10::RegistrationHandleRAII>& handles);

}  // namespace fsdp::internal
