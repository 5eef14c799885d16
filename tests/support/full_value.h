// Values and gradients of sharded parameters as plain tensors, to be compared.
#pragma once

#include "dtensor/dtensor.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

namespace fsdp::testing {

// The global value of a DTensor, detached; a plain tensor as it is. Collective.
inline at::Tensor full_value(const at::Tensor& tensor) {
  if (!tensor.defined() || !is_dtensor(tensor)) return tensor;
  c10::NoGradGuard no_grad;
  return DTensor(tensor.detach()).full_tensor();
}

// Of the tensor's .grad; undefined where it has none. Collective.
inline at::Tensor full_gradient(const at::Tensor& parameter) {
  return full_value(parameter.grad());
}

}  // namespace fsdp::testing
