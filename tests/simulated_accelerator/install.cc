#include "tests/simulated_accelerator/install.h"

#include "tests/simulated_accelerator/allocator.h"
#include "tests/simulated_accelerator/boxed_kernel.h"
#include "tests/simulated_accelerator/device_guard.h"
#include "tests/simulated_accelerator/hooks.h"
#include "tests/simulated_accelerator/kernels.h"
#include "tests/simulated_accelerator/machine.h"

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/library.h>

#include <string>
#include <vector>

namespace fsdp::testing::simulated {
namespace {

constexpr auto kDeviceKey = c10::DispatchKey::PrivateUse1;

// Composite operators that are one launch on CUDA.
bool is_fused(const c10::OperatorName& name) {
  return name.name.starts_with("aten::_foreach_") || name.name == "aten::_chunk_cat" ||
         (name.name == "aten::split_with_sizes_copy" && name.overload_name == "out");
}

// Kernels of the device go before composite ones, which would give other bits than the
// CPU's own kernel. A mere fallback would go behind them.
bool takes_boxed_kernel(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  if (!op.hasSchema() || !name.name.starts_with("aten::") || name.name == "aten::set_")
    return false;
  if (op.hasKernelForDispatchKey(kDeviceKey)) return false;
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) || is_fused(name);
}

void register_own_kernels() {
  static auto& library =
      *new torch::Library(torch::Library::IMPL, "aten", kDeviceKey, __FILE__, __LINE__);
  register_memory_kernels(library);
  register_view_kernels(library);
  register_copy_kernels(library);
  register_dropout_kernel(library);
}

void register_boxed_kernels() {
  static auto& registered = *new std::vector<c10::RegistrationHandleRAII>;
  const auto kernel = [] { return c10::KernelFunction::makeFromBoxedFunction<&boxed_kernel>(); };
  const std::string by = "simulated accelerator";
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || !takes_boxed_kernel(*op)) continue;
    registered.push_back(
        dispatcher.registerImpl(name, kDeviceKey, kernel(), std::nullopt, nullptr, by));
  }
  registered.push_back(dispatcher.registerFallback(kDeviceKey, kernel(), by));
}

bool install_now() {
  // Sums of many threads have other bits than those of one, and autograd's threads for
  // devices would have more of them than ranks that are threads.
  at::set_num_threads(1);
  c10::register_privateuse1_backend("simulated");
  c10::impl::registerDeviceGuard(kDeviceType, device_guard());
  at::RegisterPrivateUse1HooksInterface(hooks());
  c10::SetAllocator(kDeviceType, device_allocator());
  register_own_kernels();
  register_boxed_kernels();
  return true;
}

}  // namespace

void install() { [[maybe_unused]] static const bool installed = install_now(); }

}  // namespace fsdp::testing::simulated
