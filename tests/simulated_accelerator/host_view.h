// Tensors of the device as CPU kernels see them, and what such a kernel accesses.
#pragma once

#include "fake_device/private_use/kernels.h"
#include "tests/simulated_accelerator/access_history.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp::testing::simulated {

using internal::PlainKernels;
using internal::with_tensors;

bool is_on_device(const at::Tensor& tensor);

// The same memory as a tensor on CPU. Keeps nothing alive, as a kernel in flight does
// not.
at::Tensor host_view(const at::Tensor& tensor);

// Of a tensor that is rows of something larger, row by row, since other streams may be at
// what is between them; of one that is strided otherwise, from its first to its last
// byte.
using Accesses = std::vector<Access>;
Accesses reads(const at::Tensor& tensor);
Accesses writes(const at::Tensor& tensor);
void add(Accesses& to, const Accesses& more);

// A copy of a value that the host holds. Numbers wrapped as tensors stay that: types are
// promoted by it.
at::Tensor copy_of_host_value(const at::Tensor& value);

// Shaped like `tensor`, filled with `number`; a wrapped number, where that is one.
at::Tensor filled_like(const at::Tensor& tensor, int64_t number);

}  // namespace fsdp::testing::simulated
