// Streams and events of a device.
#include "device_mesh/internal/accelerator.h"
#include "tests/simulated_accelerator/install.h"
#include "tests/simulated_accelerator/run.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

namespace fsdp::testing {
namespace {

using internal::CurrentStream;
using internal::DeviceEvent;
using internal::DeviceStream;
using simulated::kDevice;
using ::testing::IsEmpty;
using ::testing::Not;

class DeviceStreams : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { simulated::install(); }
};

TEST_F(DeviceStreams, BecomeCurrentWithTheirDeviceForAScope) {
  simulated::run_in({.schedule = simulated::kLate}, [] {
    const auto before = DeviceStream::current(kDevice), pooled = DeviceStream::from_pool(kDevice);
    EXPECT_FALSE(pooled.is_host());
    EXPECT_EQ(pooled.device(), kDevice);
    EXPECT_NE(before, pooled);
    {
      const CurrentStream current(pooled);
      EXPECT_EQ(DeviceStream::current(kDevice), pooled);
    }
    EXPECT_EQ(DeviceStream::current(kDevice), before);
  });
}

// Reads on one stream what another one writes.
std::set<std::string> unordered_after(bool waits) {
  const auto report = simulated::run_in({.schedule = simulated::kLate}, [=] {
    const auto reader = DeviceStream::current(kDevice), writer = DeviceStream::from_pool(kDevice);
    auto values = at::zeros({4}, kDevice);
    DeviceEvent event;
    event.record(reader);
    writer.wait(event);
    {
      const CurrentStream current(writer);
      values.fill_(3);
    }
    event.record(writer);
    if (waits) reader.wait(event);
    const auto read = values.add(1);
  });
  return report.unordered;
}

TEST_F(DeviceStreams, WaitForAnEventThatIsRecordedAgain) {
  EXPECT_THAT(unordered_after(/*waits=*/true), IsEmpty());
  EXPECT_THAT(unordered_after(/*waits=*/false), Not(IsEmpty()));
}

TEST_F(DeviceStreams, WaitForNoEventThatWasNotRecorded) {
  const auto report = simulated::run_in({.schedule = simulated::kLate},
                                        [] { DeviceStream::current(kDevice).wait(DeviceEvent()); });
  EXPECT_THAT(report.failures, IsEmpty());
}

}  // namespace
}  // namespace fsdp::testing
