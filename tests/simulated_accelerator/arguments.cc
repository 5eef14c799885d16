#include "tests/simulated_accelerator/arguments.h"

#include "tests/simulated_accelerator/current_stream.h"
#include "tests/simulated_accelerator/host_view.h"
#include "tests/simulated_accelerator/machine.h"

#include <utility>

namespace fsdp::testing::simulated {
namespace {

// As a kernel takes them: by value, what the host holds.
at::Tensor take_tensor(const at::Tensor& tensor, bool is_output, Arguments& arguments) {
  const auto dtype = tensor.scalar_type();
  arguments.has_mask |= dtype == at::kBool || dtype == at::kByte;
  if (!is_on_device(tensor)) {
    arguments.has_host_tensor |= tensor.dim() > 0 && tensor.numel() > 0;
    return copy_of_host_value(tensor);
  }
  arguments.device = tensor.device();
  arguments.has_empty_output |= is_output && tensor.numel() == 0;
  add(arguments.accesses, is_output ? writes(tensor) : reads(tensor));
  return host_view(tensor);
}

bool takes_generator(const c10::Argument& argument) {
  return argument.type()->str().find("Generator") != std::string::npos;
}

}  // namespace

std::string name_of(const c10::FunctionSchema& schema) {
  const auto& overload = schema.overload_name();
  return schema.name() + (overload.empty() ? "" : "." + overload);
}

Arguments take_arguments(const c10::FunctionSchema& schema, Values& stack) {
  const auto count = schema.arguments().size();
  Arguments arguments{torch::jit::pop(stack, count), {}, {kDeviceType, current_device()}};
  for (size_t i = 0; i < count; ++i) {
    const auto& argument = schema.arguments()[i];
    const auto& given = arguments.given[i];
    if (takes_generator(argument)) arguments.generator = i;
    arguments.on_host.push_back(given.isDevice()
                                    ? c10::IValue(c10::Device(c10::kCPU))
                                    : with_tensors(given, [&](const at::Tensor& tensor) {
                                        return take_tensor(tensor, is_written(argument), arguments);
                                      }));
  }
  return arguments;
}

}  // namespace fsdp::testing::simulated
