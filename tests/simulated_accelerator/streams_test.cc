// Streams, events and memory as c10 and at::accelerator show them.
#include "tests/simulated_accelerator/run.h"

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <thread>

namespace fsdp::testing::simulated {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

const at::TensorOptions kOptions(kDevice);

TEST(Events, ThatArePolledAreReachedInTheEnd) {
  run_in({.schedule = kLate}, [] {
    c10::Event done(kDeviceType);
    EXPECT_TRUE(done.query()) << "was never recorded";
    auto x = at::zeros({4}, kOptions);
    for (int i = 0; i < 5; ++i) x.add_(1);
    done.record(current_stream(kDevice));
    int polls = 0;
    while (!done.query()) ++polls;
    EXPECT_GT(polls, 1);
    EXPECT_EQ(counters_now(kDevice).queries.total, polls + 1);
    EXPECT_EQ(counters_now(kDevice).host_syncs.total, 0);
  });
}

TEST(Events, AreWaitedForByTheHost) {
  const auto report = run_in({.schedule = kLate}, [] {
    const auto side = open_stream(kDevice);
    const c10::StreamGuard on_side(side);
    const auto x = at::full({4}, 3.0, kOptions);
    c10::Event done(kDeviceType);
    done.record(side);
    done.synchronize();
    EXPECT_EQ(static_cast<const float*>(x.const_data_ptr())[3], 3);
    at::full({4}, 3.0, kOptions);
    side.synchronize();
    at::accelerator::synchronizeDevice(kDevice.index());
  });
  EXPECT_THAT(report.devices[0].host_syncs.by_name,
              ElementsAre(Pair("synchronizeDevice", 1), Pair("synchronizeEvent", 1),
                          Pair("synchronizeStream", 1)));
}

TEST(Streams, AreCurrentForAThreadAndADevice) {
  run_in({}, [] {
    const auto side = open_stream(kDevice);
    const c10::StreamGuard on_side(side);
    EXPECT_EQ(current_stream(kDevice), side);
    EXPECT_NE(current_stream(device(1)), side);
    std::thread([&] { EXPECT_NE(current_stream(kDevice), side); }).join();
    const c10::DeviceGuard on_other(device(2));
    EXPECT_EQ(at::empty({1}, at::TensorOptions(kDeviceType)).device(), device(2));
  });
}

const RecordedItem& item_named(const Report& report, const std::string& name) {
  for (const auto& item : report.items) {
    if (item.name.operation == name) return item;
  }
  throw std::runtime_error("no item " + name);
}

TEST(Items, OfStreamsThatAreNotJoinedMayOverlap) {
  const auto report = run_in({.items = Settings::Items::kRecorded}, [] {
    const auto side = open_stream(kDevice);
    const auto x = at::zeros({4}, kOptions);
    c10::Event made(kDeviceType), used(kDeviceType);
    made.record(current_stream(kDevice));
    x.sin();
    made.block(side);
    {
      const c10::StreamGuard on_side(side);
      x.cos();
      used.record(side);
    }
    x.tan();
    used.block(current_stream(kDevice));
    x.exp();
  });
  const auto& on_side = item_named(report, "aten::cos");
  EXPECT_FALSE(on_side.may_overlap(item_named(report, "aten::zero_")));
  EXPECT_TRUE(on_side.may_overlap(item_named(report, "aten::sin")));
  EXPECT_TRUE(on_side.may_overlap(item_named(report, "aten::tan")));
  EXPECT_FALSE(on_side.may_overlap(item_named(report, "aten::exp")));
  EXPECT_FALSE(item_named(report, "aten::sin").may_overlap(item_named(report, "aten::tan")));
}

TEST(Memory, IsHandedOutAgainOnItsOwnStreamOnly) {
  run_in({}, [] {
    const auto side = open_stream(kDevice);
    auto first = at::empty({300}, kOptions);
    const auto* const data = first.const_data_ptr();
    first.reset();
    {
      const c10::StreamGuard on_side(side);
      EXPECT_NE(at::empty({300}, kOptions).const_data_ptr(), data);
    }
    EXPECT_EQ(at::empty({300}, kOptions).const_data_ptr(), data);
  });
}

TEST(Memory, IsPoisonedWhenItIsHandedOut) {
  run_in({}, [] {
    at::zeros({300}, kOptions);
    EXPECT_TRUE(at::empty({300}, kOptions).isnan().all().item<bool>());
  });
}

TEST(Memory, ThatWasRecordedOnAStreamIsNotHandedOutAgain) {
  const auto report = run_in({}, [] {
    auto first = at::empty({300}, kOptions);
    const auto* const data = first.const_data_ptr();
    first.record_stream(open_stream(kDevice));
    first.reset();
    EXPECT_NE(at::empty({300}, kOptions).const_data_ptr(), data);
  });
  EXPECT_EQ(report.devices[0].record_streams, 1);
}

TEST(Memory, IsCounted) {
  const auto report = run_in({}, [] {
    const auto start = at::accelerator::getDeviceStats(0).allocated_bytes[0].current;
    const auto kept = at::empty({256}, kOptions);
    at::empty({512}, kOptions);
    const auto stats = at::accelerator::getDeviceStats(0);
    EXPECT_EQ(stats.allocated_bytes[0].current - start, 1024);
    EXPECT_GE(stats.allocated_bytes[0].peak - start, 3072);
    at::accelerator::resetPeakStats(0);
    EXPECT_EQ(at::accelerator::getDeviceStats(0).allocated_bytes[0].peak - start, 1024);
  });
  EXPECT_EQ(report.devices[0].allocations, 2);
}

TEST(Memory, IsKnownByItsAddress) {
  run_in({}, [] {
    const auto x = at::arange(6, at::kFloat).to(device(3));
    const auto same = at::from_blob(x.mutable_data_ptr(), {2, 3}, at::TensorOptions(kDeviceType));
    EXPECT_EQ(same.device(), device(3));
    EXPECT_TRUE(same.cpu().view({6}).equal(x.cpu()));
  });
}

}  // namespace
}  // namespace fsdp::testing::simulated
