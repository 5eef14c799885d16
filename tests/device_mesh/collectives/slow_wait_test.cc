#include "device_mesh/collectives/backend/slow_wait.h"

#include "device_mesh/collectives/backend/c10d_collectives.h"
#include "device_mesh/process_group.h"
#include "tests/support/errors.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>

namespace fsdp::internal {
namespace {

using ::testing::AllOf;
using testing::Fault;
using ::testing::HasSubstr;
using testing::inject_fault;
using testing::message_of;
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

// A message that the backend forgets, over a link that refuses the next one.
TEST(SlowWait, EndsWhereTheLinkIsBroken) {
  set_slow_wait_threshold(std::chrono::milliseconds(200));
  std::promise<void> over;
  run_ranks(2, [&](int64_t rank) {
    if (rank == 1) return over.get_future().wait();
    const auto group = default_process_group();
    inject_fault(group, std::make_shared<Fault>(Fault{.kind = Fault::Kind::kError, .at = 0}),
                 std::chrono::seconds(60));
    auto received = at::empty({1}, at::kByte);
    EXPECT_THAT(message_of([&] { receive(group, received, 1, 9).wait("all-gather of unit 'l0'"); }),
                AllOf(HasSubstr("all-gather of unit 'l0' failed on rank 0"),
                      HasSubstr("injected failure")));
    over.set_value();
  });
  set_slow_wait_threshold(std::chrono::seconds(30));
}

// Nor does looking at it end one whose link is there.
TEST(SlowWait, GoesOnWhereTheOtherRankIsLate) {
  set_slow_wait_threshold(std::chrono::milliseconds(200));
  run_ranks(2, [](int64_t rank) {
    const auto group = default_process_group();
    auto bytes = at::full({1}, 10 + rank, at::kByte);
    for (int round = 0; round < 3; ++round) {
      if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
      rank == 1 ? send(group, bytes, 0, 9).wait("send")
                : receive(group, bytes, 1, 9).wait("receive");
    }
    EXPECT_EQ(bytes.item<int64_t>(), 11);
  });
  set_slow_wait_threshold(std::chrono::seconds(30));
}

}  // namespace
}  // namespace fsdp::internal
