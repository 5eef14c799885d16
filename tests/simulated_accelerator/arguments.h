// The arguments of one call of an operator, as they were given, and as a CPU kernel takes
// them.
#pragma once

#include "fake_device/private_use/kernels.h"
#include "tests/simulated_accelerator/access_history.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <optional>
#include <string>
#include <vector>

namespace fsdp::testing::simulated {

using Values = torch::jit::Stack;
using internal::is_written;

// "aten::add.Tensor"
std::string name_of(const c10::FunctionSchema& schema);

struct Arguments {
  Values given;
  Values on_host;
  c10::Device device;
  std::vector<Access> accesses = {};
  std::optional<size_t> generator = {};  // the argument that takes one
  bool has_mask = false;                 // a tensor of booleans or bytes
  bool has_host_tensor = false;          // of one element or more and a dimension
  bool has_empty_output = false;         // which the kernel may resize
};

// Takes the arguments off the stack.
Arguments take_arguments(const c10::FunctionSchema& schema, Values& stack);

}  // namespace fsdp::testing::simulated
