#include "fake_device/fake_device.h"

#include "fake_device/kernels.h"
#include "fake_device/memory.h"
#include "fake_device/private_use/kernels.h"
#include "fake_device/shape_kernel.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <atomic>
#include <string>

namespace fsdp {
namespace {

const c10::Device kDevice(kFakeDevice, 0);

c10::Stream stream_of(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }

thread_local c10::StreamId current_stream = 0;
std::atomic<c10::StreamId> last_stream = 0;

// Streams and events are numbers, and what is always done.
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

const c10::impl::DeviceGuardImplInterface* fake_device_guard() {
  static auto& guard = *new FakeDeviceGuard;
  return &guard;
}

at::PrivateUse1HooksInterface* fake_hooks() {
  static auto& hooks = *new FakeHooks;
  return &hooks;
}

bool install_now() {
  c10::register_privateuse1_backend("fake");
  c10::impl::registerDeviceGuard(kFakeDevice, fake_device_guard());
  at::RegisterPrivateUse1HooksInterface(fake_hooks());
  c10::SetAllocator(kFakeDevice, internal::fake_allocator());
  static auto& library = *new torch::Library(torch::Library::IMPL, "aten",
                                             c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  internal::register_memory_kernels(library);
  internal::register_view_kernels(library);
  internal::register_attention_kernels(library);
  internal::register_kernels_without_meta(library);
  internal::register_boxed_kernels(
      c10::KernelFunction::makeFromBoxedFunction<&internal::shape_kernel>(), "the fake device",
      &internal::has_shape_kernel);
  return true;
}

// LibTorch registers nothing for it.
constexpr auto kModeKey = c10::DispatchKey::Fake;

bool has_tensor(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    if (argument.type()->str().find("Tensor") != std::string::npos) return true;
  }
  return false;
}

// What makes a tensor of none is told the device, where it was told none or the CPU.
void make_on_fake_device(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto place = schema.argumentIndexWithName("device");
  if (place && !has_tensor(schema)) {
    auto& device = torch::jit::peek(*stack, static_cast<size_t>(*place), schema.arguments().size());
    if (device.isNone() || device.toDevice().is_cpu()) device = c10::Device(kFakeDevice, 0);
  }
  const c10::impl::ExcludeDispatchKeyGuard below(kModeKey);
  op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(_, Fake, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&make_on_fake_device>());
}

}  // namespace

void install_fake_device() { [[maybe_unused]] static const bool installed = install_now(); }

OnFakeDevice::OnFakeDevice() : mode_(c10::DispatchKeySet(kModeKey)) {}

}  // namespace fsdp
