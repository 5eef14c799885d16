// The device that the tests of this folder run on: CUDA's, or with FSDP_TEST_DEVICE=cpu
// the CPU, which shows that they run at all where there is no GPU.
#pragma once

#include "tests/training_programs/program_rank.h"

#include <c10/core/Device.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::testing {

c10::DeviceType tested_device_type();
// Of the groups of ranks that are processes: nccl on CUDA.
std::string tested_backend();
int cuda_devices();

#define SKIP_UNLESS_CUDA_DEVICES(count)                                                      \
  if (cuda_devices() < (count))                                                              \
  GTEST_SKIP() << "NOT SHOWN ON CUDA: this needs " << (count) << " CUDA devices, there are " \
               << cuda_devices()

#define SKIP_WITHOUT_TESTED_DEVICE() \
  if (tested_device_type() != c10::kCPU) SKIP_UNLESS_CUDA_DEVICES(1)

// Keeps the tested device's current stream busy for tens of milliseconds.
void occupy_current_stream();
// Whether it still is.
bool is_current_stream_busy();

int64_t ranks_of(const std::vector<int64_t>& mesh);

// While it lives, this process is rank 0 of a world where nothing is sent.
class FakeWorld {
 public:
  explicit FakeWorld(int64_t ranks);
  ~FakeWorld();
  FakeWorld(const FakeWorld&) = delete;
  FakeWorld& operator=(const FakeWorld&) = delete;
};

// The values that a program keeps as rank 0 of a world of `ranks` where nothing is sent.
Values run_in_fake_world(const TrainingProgram& program, c10::DeviceType device, int64_t ranks);

// Of values that should be those of `expected` but for rounding: the largest difference,
// relative to the largest element of its tensor; infinity where shapes differ or
// something is not a number.
double largest_difference(const Values& values, const Values& expected);

// How much values of a device may differ by.
inline constexpr double kRounding = 1e-5, kRoundingOf16Bits = 2e-2;

// For the report: a line "FIGURE name: value unit".
void report_figure(const std::string& name, double value, const std::string& unit);

}  // namespace fsdp::testing
