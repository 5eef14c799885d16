// The memory of the fake device: blocks that are counted and have no bytes. Thread-safe.
#pragma once

#include "fake_device/fake_device.h"

#include <c10/core/Allocator.h>

namespace fsdp::internal {

c10::Allocator* fake_allocator();

}  // namespace fsdp::internal
