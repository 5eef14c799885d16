#include "on_demand/pass.h"
#include "tests/support/errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
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
  std::promise<void> has_begun, may_end;
  std::thread autograd([&] {
    backward.begin();
    EXPECT_FALSE(backward.has_failed()) << "which this thread runs";
    has_begun.set_value();
    may_end.get_future().wait();
    std::this_thread::sleep_for(milliseconds(20));
    backward.end();
  });
  has_begun.get_future().wait();
  EXPECT_TRUE(backward.has_failed());
  may_end.set_value();
  backward.await_end(std::chrono::seconds(60));
  EXPECT_FALSE(backward.has_failed());
  autograd.join();
}

TEST(OpenBackward, IsNotWaitedForByTheThreadThatCleansUp) {
  OpenBackward backward(/*global_rank=*/0);
  std::thread([&] { backward.begin(); }).join();
  EXPECT_TRUE(backward.has_failed());
  backward.run_here();
  EXPECT_FALSE(backward.has_failed());
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
