// Calls of the operators that have unboxed kernels at the gate, one per kind of argument.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <functional>
#include <string>
#include <vector>

namespace fsdp::testing {

struct HotOperator {
  std::string name;                              // "aten::add"
  std::string overload;                          // "Tensor"
  std::vector<std::vector<int64_t>> parameters;  // shapes
  // The boxed call on an input that requires grad and on the parameters.
  std::function<torch::jit::Stack(const at::Tensor& input, const std::vector<at::Tensor>&)> call;
  std::vector<int64_t> input;
};

// Those that read elements.
std::vector<HotOperator> touching_operators();
// Those that alias their only parameter.
std::vector<HotOperator> aliasing_operators();

}  // namespace fsdp::testing
