// Kernels that any device at LibTorch's PrivateUse1 may have, and what kernels that take
// any operator need.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <functional>
#include <string>
#include <vector>

namespace c10 {
class OperatorHandle;
}
namespace torch {
class Library;
}

namespace fsdp::internal {

// Views and set_, which look at no value. `library` is aten's for PrivateUse1.
void register_view_kernels(torch::Library& library);

// `kernel` for every operator of aten that CUDA would run as one launch and that has no
// kernel for PrivateUse1 yet: those with a kernel for the CPU, and fused composites. They
// go before composite kernels, which decompose; a mere fallback would go behind. Where
// `takes` says no an operator is left alone. `by` stands in error messages.
void register_boxed_kernels(const c10::KernelFunction& kernel, const std::string& by,
                            const std::function<bool(const c10::OperatorHandle&)>& takes);

// Within its scope operators are plain kernels, whatever modes the thread is in.
class PlainKernels {
 public:
  PlainKernels()
      : keys_(c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
              c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                  c10::autocast_dispatch_keyset) {}

 private:
  c10::impl::ForceDispatchKeyGuard keys_;
};

// Tensors in the arguments and results of operators.

// `value` with each defined tensor in it, in lists too, replaced by what `replace`
// returns.
c10::IValue with_tensors(const c10::IValue& value,
                         const std::function<at::Tensor(const at::Tensor&)>& replace);

bool is_written(const c10::Argument& argument);

// The argument among `given` that result `result` of the schema is.
const c10::IValue& returned_argument(const c10::FunctionSchema& schema,
                                     const std::vector<c10::IValue>& given, size_t result);

}  // namespace fsdp::internal
