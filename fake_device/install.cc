#include "fake_device/device_guard.h"
#include "fake_device/fake_device.h"
#include "fake_device/kernels.h"
#include "fake_device/memory.h"
#include "fake_device/private_use/kernels.h"
#include "fake_device/shape_kernel.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace fsdp {
namespace {

bool install_now() {
  c10::register_privateuse1_backend("fake");
  c10::impl::registerDeviceGuard(kFakeDevice, internal::fake_device_guard());
  at::RegisterPrivateUse1HooksInterface(internal::fake_hooks());
  c10::SetAllocator(kFakeDevice, internal::fake_allocator());
  static auto& library = *new torch::Library(torch::Library::IMPL, "aten",
                                             c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  internal::register_memory_kernels(library);
  internal::register_view_kernels(library);
  internal::register_attention_kernels(library);
  internal::register_kernels_without_meta(library);
  internal::register_boxed_kernels(
      c10::KernelFunction::makeFromBoxedFunction<&internal::shape_kernel>(), "the fake device",
      &internal::has_shape_kernel);
  return true;
}

}  // namespace

void install_fake_device() { [[maybe_unused]] static const bool installed = install_now(); }

}  // namespace fsdp
