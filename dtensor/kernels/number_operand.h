// A C++ number as elementwise kernels take it: a tensor without dimensions, of the dtype
// that they compute in. LibTorch makes one of double, and then a converted one, which
// costs more than the rest of a small operator; an optimizer does so five times per
// parameter and step.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

namespace fsdp::internal {

// `number` converted as LibTorch would beside `operand`, with the same bits. Null where
// that is left to LibTorch: beside anything but float tensors on the CPU, and for complex
// numbers. It is this thread's, and has the value until the next call.
const at::Tensor* number_operand(const at::Tensor& operand, const at::Scalar& number);

}  // namespace fsdp::internal
