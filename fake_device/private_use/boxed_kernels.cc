#include "fake_device/private_use/kernels.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <vector>

namespace fsdp::internal {
namespace {

constexpr auto kDeviceKey = c10::DispatchKey::PrivateUse1;

// Composite operators that are one launch on CUDA.
bool is_fused(const c10::OperatorName& name) {
  return name.name.starts_with("aten::_foreach_") || name.name == "aten::_chunk_cat" ||
         (name.name == "aten::split_with_sizes_copy" && name.overload_name == "out");
}

bool is_one_launch(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  if (!op.hasSchema() || !name.name.starts_with("aten::") || name.name == "aten::set_")
    return false;
  if (op.hasKernelForDispatchKey(kDeviceKey)) return false;
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) || is_fused(name);
}

}  // namespace

void register_boxed_kernels(const c10::KernelFunction& kernel, const std::string& by,
                            const std::function<bool(const c10::OperatorHandle&)>& takes) {
  static auto& registered = *new std::vector<c10::RegistrationHandleRAII>;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || !is_one_launch(*op) || !takes(*op)) continue;
    registered.push_back(
        dispatcher.registerImpl(name, kDeviceKey, kernel, std::nullopt, nullptr, by));
  }
  registered.push_back(dispatcher.registerFallback(kDeviceKey, kernel, by));
}

}  // namespace fsdp::internal
