// The current device of a host thread, and its current stream on each device, as for
// CUDA: of a new thread, device 0 and the default streams.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>

namespace fsdp::testing::simulated {

c10::DeviceIndex current_device();
c10::DeviceIndex exchange_current_device(c10::DeviceIndex device);

size_t current_queue(c10::DeviceIndex device);
size_t exchange_current_queue(c10::DeviceIndex device, size_t queue);

// A queue of the machine as LibTorch names it, and back. Default streams have the number
// 0.
c10::Stream stream_of(size_t queue, c10::DeviceIndex device);
size_t queue_of(const c10::Stream& stream);

}  // namespace fsdp::testing::simulated
