// Devices, streams and events of the simulated accelerator as c10 sees them, through
// c10::DeviceGuard, c10::Stream, c10::Event and autograd's engine.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace fsdp::testing::simulated {

const c10::impl::DeviceGuardImplInterface* device_guard();

}  // namespace fsdp::testing::simulated
