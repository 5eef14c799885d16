#include "tests/simulated_accelerator/install.h"

#include "fake_device/private_use/kernels.h"
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

namespace fsdp::testing::simulated {
namespace {

constexpr auto kDeviceKey = c10::DispatchKey::PrivateUse1;

void register_own_kernels() {
  static auto& library =
      *new torch::Library(torch::Library::IMPL, "aten", kDeviceKey, __FILE__, __LINE__);
  register_memory_kernels(library);
  internal::register_view_kernels(library);
  register_copy_kernels(library);
  register_dropout_kernel(library);
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
  internal::register_boxed_kernels(c10::KernelFunction::makeFromBoxedFunction<&boxed_kernel>(),
                                   "simulated accelerator",
                                   [](const c10::OperatorHandle&) { return true; });
  return true;
}

}  // namespace

void install() { [[maybe_unused]] static const bool installed = install_now(); }

}  // namespace fsdp::testing::simulated
