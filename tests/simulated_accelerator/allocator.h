// The allocators that LibTorch gets: of the devices' memory, and of pinned host memory.
#pragma once

#include <c10/core/Allocator.h>

namespace fsdp::testing::simulated {

// Memory belongs to the stream that is current when it is allocated. As a
// c10::DeviceAllocator it also serves at::accelerator's memory statistics.
c10::Allocator* device_allocator();

// What record_stream() does to memory of this allocator; nothing to other memory.
void record_stream(const c10::DataPtr& data);

c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);

}  // namespace fsdp::testing::simulated
