#include "device_mesh/internal/accelerator.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace fsdp::internal {
namespace {

c10::Stream host() { return c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::kCPU)); }

}  // namespace

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

DeviceStream DeviceStream::current(c10::Device device) {
  if (device.is_cpu()) return DeviceStream(host());
  return DeviceStream(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

DeviceStream DeviceStream::from_pool(c10::Device device) {
  if (device.is_cpu()) return DeviceStream(host());
  const c10::impl::VirtualGuardImpl guard(device.type());
  return DeviceStream(guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true));
}

void DeviceStream::wait(const DeviceEvent& event) const {
  if (event.event_) event.event_->block(stream_);
}

void DeviceEvent::record(const DeviceStream& stream) {
  if (stream.is_host()) return;
  if (!event_) event_.emplace(stream.stream_.device_type());
  event_->record(stream.stream_);
}

void DeviceEvent::await_on_host() const {
  if (event_) event_->synchronize();
}

bool DeviceEvent::has_passed() const { return !event_ || event_->query(); }

}  // namespace fsdp::internal
