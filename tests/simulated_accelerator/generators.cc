#include "tests/simulated_accelerator/generators.h"

#include "tests/simulated_accelerator/current_stream.h"
#include "tests/simulated_accelerator/machine.h"

#include <ATen/CPUGeneratorImpl.h>

#include <vector>

namespace fsdp::testing::simulated {
namespace {

class DeviceGenerator final : public at::CPUGeneratorImpl {
 public:
  explicit DeviceGenerator(c10::DeviceIndex index) { device_ = c10::Device(kDeviceType, index); }
  DeviceGenerator* clone_impl() const override {
    auto* const made = new DeviceGenerator(device().index());
    made->set_state_in_kernel(*state_in_kernel());
    return made;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    Machine::instance().refuse_in_capture(device().index(), "the state of a generator");
    return state_in_kernel();
  }
  void set_state(const c10::TensorImpl& state) override {
    Machine::instance().refuse_in_capture(device().index(), "the state of a generator");
    set_state_in_kernel(state);
  }

  c10::intrusive_ptr<c10::TensorImpl> state_in_kernel() const {
    return at::CPUGeneratorImpl::get_state();
  }
  void set_state_in_kernel(const c10::TensorImpl& state) { at::CPUGeneratorImpl::set_state(state); }
};

DeviceGenerator& impl_of(const at::Generator& generator) {
  return static_cast<DeviceGenerator&>(*generator.unsafeGetGeneratorImpl());
}

c10::DeviceIndex known_index(c10::DeviceIndex device) {
  return device < 0 ? current_device() : device;
}

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const auto& generators = *[] {
    auto* const made = new std::vector<at::Generator>;
    for (c10::DeviceIndex index = 0; index < kDevices; ++index)
      made->push_back(new_generator(index));
    return made;
  }();
  return generators.at(static_cast<size_t>(known_index(device)));
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<DeviceGenerator>(known_index(device));
}

at::Generator cpu_generator_like(const at::Generator& device_generator) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>();
  generator.unsafeGetGeneratorImpl()->set_state(*impl_of(device_generator).state_in_kernel());
  return generator;
}

void advance(const at::Generator& device_generator, const at::Generator& cpu_generator) {
  impl_of(device_generator)
      .set_state_in_kernel(*cpu_generator.unsafeGetGeneratorImpl()->get_state());
}

}  // namespace fsdp::testing::simulated
