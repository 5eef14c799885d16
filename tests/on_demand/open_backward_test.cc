#include "on_demand/pass.h"
#include "tests/support/errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace fsdp::testing {
namespace {

using internal::OpenBackward;
using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(OpenBackward, IsWaitedForByOtherThreads) {
  OpenBackward backward(/*global_rank=*/0);
  EXPECT_FALSE(backward.has_failed());
  backward.begin();
  EXPECT_TRUE(backward.has_failed());
  std::thread ends([&] {
    std::this_thread::sleep_for(milliseconds(20));
    backward.end();
  });
  backward.await_end(std::chrono::seconds(60));
  EXPECT_FALSE(backward.has_failed());
  ends.join();
}

TEST(OpenBackward, IsNotWaitedForWhereItHasEnded) {
  OpenBackward backward(/*global_rank=*/0);
  backward.begin();
  backward.end();
  EXPECT_NO_THROW(backward.await_end(milliseconds(0)));
}

TEST(OpenBackward, ThatGoesOnIsToldAfterAWhile) {
  OpenBackward backward(/*global_rank=*/3);
  backward.begin();
  EXPECT_THAT(message_of([&] { backward.await_end(milliseconds(5)); }),
              AllOf(HasSubstr("waited 5 ms for the end of a backward"),
                    HasSubstr("another thread is in one"), HasSubstr("rank 3")));
}

}  // namespace
}  // namespace fsdp::testing
