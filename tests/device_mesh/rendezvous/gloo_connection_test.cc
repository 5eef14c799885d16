// Connecting to a rank that has come to the roll call and is gone before it connects.
#include "device_mesh/rendezvous/gloo_connection.h"

#include "device_mesh/rendezvous/roll_call.h"
#include "tests/support/errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

namespace fsdp::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;

constexpr auto kConnect = std::chrono::seconds(20);

TEST(GlooConnection, ToARankThatIsGoneEndsLongBeforeItsTimeout) {
  const auto gone = std::make_shared<std::atomic<bool>>(false);
  const auto why_gone = [gone] { return std::string(*gone ? "rank 7 has ended" : ""); };
  const auto begin = std::chrono::steady_clock::now();
  GlooRequest request;
  request.store = c10::make_intrusive<c10d::HashStore>();
  request.key_space = "pair";
  request.name = "pair";
  request.ranks = {4, 7};
  request.timeout = kConnect;
  request.deadline = begin + kConnect;
  request.why_gone = why_gone;
  request.devices = open_gloo_devices("127.0.0.1");

  std::thread other([&request, gone] {
    const auto instance = open_key_space(*request.store, request.key_space, /*opener=*/1);
    RollCall roll({.store = key_space(request.store, request.key_space, instance),
                   .group = "process group 'pair'",
                   .ranks = request.ranks,
                   .index = 1,
                   .deadline = request.deadline});
    roll.gather(presence());
    roll.meet(RollCall::Stage::kReady);
    *gone = true;  // and never connects
  });
  const auto text = message_of([&request] { connect_gloo(request); });
  other.join();
  EXPECT_THAT(text, AllOf(HasSubstr("process group 'pair' of ranks 4, 7 can not be made"),
                          HasSubstr("told on rank 4"), HasSubstr("rank 7 has ended")));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kConnect / 2);
}

}  // namespace
}  // namespace fsdp::internal
