#include "tests/simulated_accelerator/device_guard.h"

#include "tests/simulated_accelerator/allocator.h"
#include "tests/simulated_accelerator/current_stream.h"
#include "tests/simulated_accelerator/machine.h"

namespace fsdp::testing::simulated {
namespace {

const Mark& mark_of(void* event) { return *static_cast<const Mark*>(event); }

c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}

class DeviceGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kDeviceType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Device getDevice() const override { return {kDeviceType, current_device()}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kDeviceType, exchange_current_device(index_of(device))};
  }
  void setDevice(c10::Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchangeDevice(device); }

  c10::Stream getStream(c10::Device device) const override {
    return stream_of(current_queue(index_of(device)), index_of(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(static_cast<size_t>(index_of(device)), index_of(device));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_of(Machine::instance().open_stream(index_of(device)), index_of(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto device = stream.device_index();
    return stream_of(exchange_current_queue(device, queue_of(stream)), device);
  }
  bool queryStream(const c10::Stream& stream) const override {
    auto& machine = Machine::instance();
    return machine.has_finished(machine.mark(queue_of(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Machine::instance().host_waits_for_stream(queue_of(stream), "synchronizeStream");
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    Machine::instance().host_waits_for_device(device < 0 ? current_device() : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream&) const override {
    record_stream(data);
  }

  // An event is a mark; one that was never recorded is null, and nothing waits for it.
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    if (*event == nullptr) *event = new Mark;
    *static_cast<Mark*>(*event) = Machine::instance().mark(queue_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) Machine::instance().make_wait(queue_of(stream), mark_of(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || Machine::instance().has_finished(mark_of(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Machine::instance().host_waits_for(mark_of(event), "synchronizeEvent");
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Mark*>(event);
  }
};

}  // namespace

const c10::impl::DeviceGuardImplInterface* device_guard() {
  static auto& guard = *new DeviceGuard;
  return &guard;
}

}  // namespace fsdp::testing::simulated
