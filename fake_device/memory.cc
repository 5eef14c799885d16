#include "fake_device/memory.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>

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

}  // namespace

c10::Allocator* fake_allocator() {
  static auto& allocator = *new FakeAllocator;
  return &allocator;
}

}  // namespace internal

FakeMemory fake_memory() { return internal::CountedMemory::instance().memory(); }
void reset_fake_peak() { internal::CountedMemory::instance().forget_peak(); }

}  // namespace fsdp
