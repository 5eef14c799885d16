#include "fake_device/memory.h"

#include "fake_device/fake_device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>

namespace fsdp {
namespace internal {
namespace {

// Blocks that live, by their sum.
class CountedMemory {
 public:
  static CountedMemory& instance() {
    static auto& memory = *new CountedMemory;
    return memory;
  }

  void add(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    memory_.now += bytes;
    memory_.peak = std::max(memory_.peak, memory_.now);
  }
  void remove(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    memory_.now -= bytes;
  }
  FakeMemory memory() {
    const std::lock_guard lock(mutex_);
    return memory_;
  }
  void forget_peak() {
    const std::lock_guard lock(mutex_);
    memory_.peak = memory_.now;
  }

 private:
  std::mutex mutex_;
  FakeMemory memory_;
};

// Addresses are given out once and never again, so that who compares them finds out
// about views; the processor knows none of them.
char* new_address(int64_t bytes) {
  static std::atomic<uintptr_t> next = uintptr_t{1} << 60;
  const auto granules = (static_cast<uintptr_t>(bytes) + 511) / 512;
  return reinterpret_cast<char*>(next.fetch_add(granules * 512));
}

struct Block {
  explicit Block(int64_t size) : bytes(size) { CountedMemory::instance().add(bytes); }
  ~Block() { CountedMemory::instance().remove(bytes); }
  const int64_t bytes;
};

void free_block(void* block) { delete static_cast<Block*>(block); }
void free_nothing(void*) {}

class FakeAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kFakeDevice, 0);
    if (bytes == 0) return {nullptr, nullptr, &free_nothing, device};
    auto* const block = new Block(static_cast<int64_t>(bytes));
    return {new_address(block->bytes), block, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override {}
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    const auto memory = CountedMemory::instance().memory();
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = stats.reserved_bytes[0].current = memory.now;
    stats.allocated_bytes[0].peak = stats.reserved_bytes[0].peak = memory.peak;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { CountedMemory::instance().forget_peak(); }
};

constexpr c10::DispatchKeySet kDeviceKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, fake_allocator(), kDeviceKeys,
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, fake_allocator(), kDeviceKeys,
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size,
                         std::optional<at::MemoryFormat>) {
  const auto elements = c10::multiply_integers(size) + self.storage_offset();
  const auto bytes = static_cast<size_t>(elements) * self.element_size();
  auto* const storage = self.storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) {
    storage->set_data_ptr_noswap(fake_allocator()->allocate(bytes));
    storage->set_nbytes(bytes);
  }
  if (self.sizes() != size) self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

void record_stream(at::Tensor&, c10::Stream) {}

// There is nothing to copy. What the host gets is ones: a value that is true, finite and
// no number to divide by that ends a program.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool) {
  if (self.device().type() == kFakeDevice && target.is_cpu()) target.fill_(1);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, /*non_blocking=*/false);
}

at::Scalar read_number(const at::Tensor& self) {
  if (self.scalar_type() == at::kBool) return true;
  if (at::isIntegralType(self.scalar_type(), /*includeBool=*/false)) return int64_t{1};
  return 1.0;
}

}  // namespace

c10::Allocator* fake_allocator() {
  static auto& allocator = *new FakeAllocator;
  return &allocator;
}

void register_memory_kernels(torch::Library& library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("resize_", &resize);
  library.impl("record_stream", &record_stream);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &read_number);
}

}  // namespace internal

FakeMemory fake_memory() { return internal::CountedMemory::instance().memory(); }
void reset_fake_peak() { internal::CountedMemory::instance().forget_peak(); }

}  // namespace fsdp
