#include "fake_device/fake_device.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <string>

namespace fsdp {
namespace {

// LibTorch registers nothing for it.
constexpr auto kModeKey = c10::DispatchKey::Fake;

bool has_tensor(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    if (argument.type()->str().find("Tensor") != std::string::npos) return true;
  }
  return false;
}

// What makes a tensor of none is told the device, where it was told none or the CPU.
void make_on_fake_device(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto place = schema.argumentIndexWithName("device");
  if (place && !has_tensor(schema)) {
    auto& device = torch::jit::peek(*stack, static_cast<size_t>(*place), schema.arguments().size());
    if (device.isNone() || device.toDevice().is_cpu()) device = c10::Device(kFakeDevice, 0);
  }
  const c10::impl::ExcludeDispatchKeyGuard below(kModeKey);
  op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(_, Fake, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&make_on_fake_device>());
}

}  // namespace

OnFakeDevice::OnFakeDevice() : mode_(c10::DispatchKeySet(kModeKey)) {}

}  // namespace fsdp
