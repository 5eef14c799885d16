// Group state is driven by one thread at a time.
#include "fully_shard/fully_shard.h"
#include "fully_shard/params/fsdp_param_group.h"
#include "fully_shard/transport/comm_context.h"
#include "tests/support/errors.h"
#include "tests/support/on_another_thread.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <thread>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

TEST(ExclusiveUse, ASecondThreadIsToldAndTheFirstMayNest) {
  internal::User user{};
  const internal::ExclusiveUse first(user);
  EXPECT_NO_THROW(internal::ExclusiveUse nested(user));
  std::string message;
  std::thread([&] {
    try {
      const internal::ExclusiveUse second(user);
    } catch (const c10::Error& error) {
      message = error.what_without_backtrace();
    }
  }).join();
  EXPECT_THAT(message, HasSubstr("two threads"));
}

TEST(ExclusiveUse, IsTakenByTouchesAndByExplicitGathers) {
  on_ranks_of(2, [](int64_t, const DeviceMesh& mesh) {
    torch::nn::Linear linear(3, 5);
    fully_shard(linear, mesh);
    auto unit = get_fsdp_module(*linear);
    const internal::ExclusiveUse first(
        internal::unit_of(unit)->group()->info().comm_context().user());
    std::string by_touch, by_hand;
    on_another_thread([&] {
      by_touch = message_of([&] { linear(torch::ones({1, 3})); });
      by_hand = message_of([&] { unit.unshard(); });
    });
    EXPECT_THAT(by_touch, HasSubstr("two threads"));
    EXPECT_THAT(by_hand, HasSubstr("two threads"));
    EXPECT_EQ(counters(mesh).all_gathers, 0);
  });
}

}  // namespace
}  // namespace fsdp::testing
