#include "device_mesh/internal/device_types.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace fsdp::internal {

std::vector<c10::DeviceType> accelerator_types() {
  std::vector<c10::DeviceType> types;
  for (int i = 0; i < c10::COMPILE_TIME_MAX_DEVICE_TYPES; ++i) {
    const auto type = static_cast<c10::DeviceType>(i);
    if (at::accelerator::isAccelerator(type)) types.push_back(type);
  }
  return types;
}

std::vector<c10::DispatchKey> accelerator_keys(c10::DispatchKey functionality) {
  std::vector<c10::DispatchKey> keys;
  for (const auto type : accelerator_types()) {
    const auto dense = c10::computeDispatchKey(c10::kFloat, c10::kStrided, c10::Device(type));
    keys.push_back(
        c10::toRuntimePerBackendFunctionalityKey(functionality, c10::toBackendComponent(dense)));
  }
  return keys;
}

int64_t visible_devices(c10::DeviceType type) {
  if (!c10::impl::hasDeviceGuardImpl(type)) return 0;
  return c10::impl::getDeviceGuardImpl(type)->deviceCount();
}

std::optional<c10::DeviceType> visible_accelerator() {
  const auto type = at::accelerator::getAccelerator();
  return type && visible_devices(*type) > 0 ? type : std::nullopt;
}

c10::Device current_device(c10::DeviceType type) {
  if (type == c10::kCPU || visible_devices(type) == 0) return c10::Device(type);
  return c10::impl::getDeviceGuardImpl(type)->getDevice();
}

}  // namespace fsdp::internal
