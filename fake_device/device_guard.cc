#include "fake_device/device_guard.h"

#include "fake_device/fake_device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

namespace fsdp::internal {
namespace {

const c10::Device kDevice(kFakeDevice, 0);

c10::Stream stream_of(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }

thread_local c10::StreamId current_stream = 0;
std::atomic<c10::StreamId> last_stream = 0;

class FakeDeviceGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kFakeDevice; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Device getDevice() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}

  c10::Stream getStream(c10::Device) const override { return stream_of(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream_of(++last_stream); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = stream_of(current_stream);
    current_stream = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
};

// Nothing is drawn from it; a state that went over the device is no state any more.
class FakeGenerator final : public at::CPUGeneratorImpl {
 public:
  FakeGenerator() { device_ = kDevice; }
  FakeGenerator* clone_impl() const override { return new FakeGenerator; }
  void set_state(const c10::TensorImpl&) override {}
};

class FakeHooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const auto& generator = *new at::Generator(at::make_generator<FakeGenerator>());
    return generator;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<FakeGenerator>();
  }
};

}  // namespace

const c10::impl::DeviceGuardImplInterface* fake_device_guard() {
  static auto& guard = *new FakeDeviceGuard;
  return &guard;
}

at::PrivateUse1HooksInterface* fake_hooks() {
  static auto& hooks = *new FakeHooks;
  return &hooks;
}

}  // namespace fsdp::internal
