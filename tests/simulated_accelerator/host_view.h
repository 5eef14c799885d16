// Tensors of the device as CPU kernels see them, and what such a kernel accesses.
#pragma once

#include "tests/simulated_accelerator/access_history.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <functional>
#include <vector>

namespace fsdp::testing::simulated {

bool is_on_device(const at::Tensor& tensor);

// Within its scope operators are plain CPU kernels, whatever modes the thread is in.
class PlainKernels {
 public:
  PlainKernels();

 private:
  c10::impl::ForceDispatchKeyGuard keys_;
};

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

// `value` with each defined tensor in it, in lists too, replaced by what `replace`
// returns.
c10::IValue with_tensors(const c10::IValue& value,
                         const std::function<at::Tensor(const at::Tensor&)>& replace);

}  // namespace fsdp::testing::simulated
