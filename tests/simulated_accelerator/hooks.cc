#include "tests/simulated_accelerator/hooks.h"

#include "tests/simulated_accelerator/allocator.h"
#include "tests/simulated_accelerator/current_stream.h"
#include "tests/simulated_accelerator/generators.h"
#include "tests/simulated_accelerator/machine.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>

namespace fsdp::testing::simulated {
namespace {

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }

  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return exchange_current_device(device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchange_current_device(device);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device);
  }

  at::Device getDeviceFromPtr(void* data) const override {
    return {kDeviceType, Machine::instance().device_at(data, current_device())};
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
};

}  // namespace

at::PrivateUse1HooksInterface* hooks() {
  static auto& made = *new Hooks;
  return &made;
}

}  // namespace fsdp::testing::simulated
