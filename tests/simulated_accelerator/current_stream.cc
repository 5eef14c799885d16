#include "tests/simulated_accelerator/current_stream.h"

#include "tests/simulated_accelerator/machine.h"

#include <array>
#include <numeric>
#include <utility>

namespace fsdp::testing::simulated {
namespace {

thread_local c10::DeviceIndex device_of_thread = 0;

// The default stream of a device is the queue of its number.
std::array<size_t, kDevices>& queues_of_thread() {
  thread_local auto queues = [] {
    std::array<size_t, kDevices> defaults;
    std::iota(defaults.begin(), defaults.end(), size_t{0});
    return defaults;
  }();
  return queues;
}

}  // namespace

c10::DeviceIndex current_device() { return device_of_thread; }

c10::DeviceIndex exchange_current_device(c10::DeviceIndex device) {
  return std::exchange(device_of_thread, device);
}

size_t current_queue(c10::DeviceIndex device) {
  return queues_of_thread().at(static_cast<size_t>(device));
}

size_t exchange_current_queue(c10::DeviceIndex device, size_t queue) {
  return std::exchange(queues_of_thread().at(static_cast<size_t>(device)), queue);
}

c10::Stream stream_of(size_t queue, c10::DeviceIndex device) {
  const auto id = queue < static_cast<size_t>(kDevices) ? 0 : static_cast<c10::StreamId>(queue);
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, device), id);
}

size_t queue_of(const c10::Stream& stream) {
  return static_cast<size_t>(stream.id() == 0 ? stream.device_index() : stream.id());
}

}  // namespace fsdp::testing::simulated
