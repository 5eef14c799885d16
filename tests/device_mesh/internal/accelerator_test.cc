#include "device_mesh/internal/accelerator.h"

#include <gtest/gtest.h>

namespace fsdp {
namespace {

using internal::CurrentStream;
using internal::DeviceEvent;
using internal::DeviceStream;

// c10's guard for the CPU throws for events and for streams of a pool.
TEST(DeviceStream, OfTheCpuIsTheHostWhichWaitsForNothing) {
  const auto here = DeviceStream::current(c10::kCPU), pooled = DeviceStream::from_pool(c10::kCPU);
  EXPECT_TRUE(here.is_host());
  EXPECT_EQ(here, pooled);
  DeviceEvent event;
  event.record(pooled);
  here.wait(event);
  const CurrentStream current(pooled);
  EXPECT_EQ(DeviceStream::current(c10::kCPU), here);
}

}  // namespace
}  // namespace fsdp
