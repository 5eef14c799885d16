#include "tests/simulated_accelerator/allocator.h"

#include "tests/simulated_accelerator/current_stream.h"
#include "tests/simulated_accelerator/machine.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

namespace fsdp::testing::simulated {
namespace {

void free_block(void* block) { Machine::instance().free(static_cast<Block*>(block)); }
void free_nothing(void*) {}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto index = current_device();
    const c10::Device device(kDeviceType, index);
    if (bytes == 0) return {nullptr, nullptr, &free_nothing, device};
    auto* const block = Machine::instance().allocate(bytes, current_queue(index), index);
    return {block->data, block, &free_block, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "simulated accelerator: the allocator's copy_data()");
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}  // blocks never go back to the host
  void recordStream(const c10::DataPtr& data, c10::Stream) override { record_stream(data); }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const auto counters = Machine::instance().counters(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = counters.allocated_bytes;
    stats.allocated_bytes[0].peak = counters.peak_allocated_bytes;
    stats.reserved_bytes[0].current = counters.reserved_bytes;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}  // none are kept
  void resetPeakStats(c10::DeviceIndex device) override { Machine::instance().forget_peak(device); }
};

// Its lock is not the machine's: an item that runs may hold the last handle of such
// memory.
class PinnedMemory {
 public:
  static PinnedMemory& instance() {
    static auto& memory = *new PinnedMemory;
    return memory;
  }

  void* allocate(size_t bytes) {
    auto* const data = std::malloc(std::max<size_t>(bytes, 1));
    const std::lock_guard lock(mutex_);
    blocks_.insert(data);
    return data;
  }
  void free(void* data) {
    const std::lock_guard lock(mutex_);
    blocks_.erase(data);
    std::free(data);
  }
  bool has(const void* data) {
    const std::lock_guard lock(mutex_);
    return blocks_.contains(data);
  }

 private:
  std::mutex mutex_;
  std::set<const void*> blocks_;
};

void free_pinned(void* data) { PinnedMemory::instance().free(data); }

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto* const data = PinnedMemory::instance().allocate(bytes);
    return {data, data, &free_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

}  // namespace

c10::Allocator* device_allocator() {
  static auto& allocator = *new DeviceAllocator;
  return &allocator;
}

void record_stream(const c10::DataPtr& data) {
  if (data.get_deleter() != &free_block) return;
  Machine::instance().record_stream(static_cast<Block*>(data.get_context()));
}

c10::Allocator* pinned_allocator() {
  static auto& allocator = *new PinnedAllocator;
  return &allocator;
}

bool is_pinned(const void* data) { return PinnedMemory::instance().has(data); }

}  // namespace fsdp::testing::simulated
