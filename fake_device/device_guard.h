// Streams and events of the fake device: numbers, and what is always done.
#pragma once

namespace c10::impl {
struct DeviceGuardImplInterface;
}
namespace at {
struct PrivateUse1HooksInterface;
}

namespace fsdp::internal {

const c10::impl::DeviceGuardImplInterface* fake_device_guard();
at::PrivateUse1HooksInterface* fake_hooks();

}  // namespace fsdp::internal
