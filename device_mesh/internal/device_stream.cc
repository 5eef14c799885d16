#include "device_mesh/internal/device_stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace fsdp::internal {
namespace {

c10::Stream host() { return c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::kCPU)); }

}  // namespace

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
