// Kernels that any device at LibTorch's PrivateUse1 may have.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>

#include <functional>
#include <string>

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

}  // namespace fsdp::internal
