#include "device_mesh/collectives/slow_wait.h"

#include "device_mesh/collectives/backend/c10d_collectives.h"
#include "device_mesh/process_group.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ops/empty.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <string>
#include <thread>

namespace fsdp::internal {
namespace {

using ::testing::HasSubstr;
using testing::run_ranks;

TEST(SlowWait, TellsOnceWhichOperationAndForWhom) {
  set_slow_wait_threshold(std::chrono::milliseconds(200));
  ::testing::internal::CaptureStderr();
  run_ranks(2, [](int64_t rank) {
    const auto group = default_process_group();
    auto received = at::empty({1}, at::kByte);
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(900));
      send(group, received, 0, 9).wait("message");
    } else {
      receive(group, received, 1, 9).wait("all-gather of unit 'l0'");
    }
  });
  set_slow_wait_threshold(std::chrono::seconds(30));
  const auto told = ::testing::internal::GetCapturedStderr();
  const std::string line = "rank 0 still waits for the all-gather of unit 'l0': for rank 1";
  EXPECT_THAT(told, HasSubstr(line));
  EXPECT_EQ(told.find(line), told.rfind(line)) << "told twice";
}

}  // namespace
}  // namespace fsdp::internal
