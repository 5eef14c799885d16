// A call that may never come back: who asks has an answer in time all the same.
#include "device_mesh/rendezvous/deadline.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <stdexcept>

namespace fsdp::internal {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr auto kTimeLimit = std::chrono::milliseconds(250);
constexpr auto kFarAway = seconds(60);

// What a call waits for, which outlives its caller.
class Answer {
 public:
  std::function<int()> awaited() const {
    return [answer = answer_, got = got_] {
      const int value = answer->get_future().get();
      got->set_value();
      return value;
    };
  }
  // And waits until the abandoned call has ended.
  void give() {
    answer_->set_value(7);
    got_->get_future().wait();
  }

 private:
  std::shared_ptr<std::promise<int>> answer_ = std::make_shared<std::promise<int>>();
  std::shared_ptr<std::promise<void>> got_ = std::make_shared<std::promise<void>>();
};

TEST(CallWithDeadline, GivesWhatTheCallReturnsOrThrows) {
  EXPECT_EQ(call_with_deadline(kFarAway, [] { return 7; }), 7);
  EXPECT_EQ(call_with_deadline(
                kFarAway, [] { return 7; }, [] { return true; }),
            7);
  EXPECT_THROW(call_with_deadline(kFarAway, []() -> int { throw std::out_of_range("no such"); }),
               std::out_of_range);
}

TEST(CallWithDeadline, EndsWithNothingWhenTheTimeIsUp) {
  Answer answer;
  const auto begin = steady_clock::now();
  EXPECT_EQ(call_with_deadline(kTimeLimit, answer.awaited()), std::nullopt);
  EXPECT_GE(steady_clock::now() - begin, kTimeLimit);
  answer.give();
}

TEST(CallWithDeadline, EndsWithNothingWhenItIsHopeless) {
  Answer answer;
  int asked = 0;
  const auto begin = steady_clock::now();
  EXPECT_EQ(call_with_deadline(kFarAway, answer.awaited(), [&asked] { return ++asked == 3; }),
            std::nullopt);
  EXPECT_EQ(asked, 3);
  EXPECT_LT(steady_clock::now() - begin, seconds(30));
  answer.give();
}

}  // namespace
}  // namespace fsdp::internal
