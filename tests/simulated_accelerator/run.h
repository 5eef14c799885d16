// The run of a test's body on the simulated accelerator in one schedule, and what was
// seen.
//
//   for (const auto& schedule : schedules(2)) {
//     const auto report = run_in({.schedule = schedule}, [&] { loss = train(device(0)); });
//     EXPECT_THAT(report.unordered, IsEmpty());
//     EXPECT_EQ(report.devices[0].host_syncs.total, 0);
//   }
#pragma once

#include "tests/simulated_accelerator/machine.h"

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>
#include <string>
#include <vector>

namespace fsdp::testing::simulated {

// `body` from a clean start. What it has queued has run when this returns.
Report run_in(const Settings& settings, const std::function<void()>& body);

inline c10::Device device(int64_t index) {
  return {kDeviceType, static_cast<c10::DeviceIndex>(index)};
}

// Of programs with one rank.
inline const c10::Device kDevice = device(0);

// Of the calling thread. Streams that are opened have the numbers 1, 2, ... of Schedule.
c10::Stream current_stream(c10::Device device);
c10::Stream open_stream(c10::Device device);

// What the calling thread's current stream of `device` is given in between is a graph,
// with what streams that wait for it are given. It runs as ever, but what CUDA allows in
// no graph throws: hosts that wait or query, and who reads or sets a generator's state.
// The end gives what else is wrong: work on streams that are not part of it, or that
// nothing waits for.
void begin_capture(c10::Device device);
std::vector<std::string> end_capture(c10::Device device);

// What was counted on `device` since the run began.
Counters counters_now(c10::Device device);

}  // namespace fsdp::testing::simulated
