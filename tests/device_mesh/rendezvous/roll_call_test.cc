// How ranks make sure of one another when a group is made: what each is told where one is
// missing, is there twice, or cannot go on.
#include "device_mesh/rendezvous/roll_call.h"

#include "tests/support/errors.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace fsdp::internal {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using testing::expect_error;
using ::testing::HasSubstr;
using testing::message_of;

constexpr auto kSoon = std::chrono::milliseconds(300);
constexpr auto kLong = std::chrono::seconds(60);

class Members {
 public:
  explicit Members(std::vector<int64_t> ranks, std::function<std::string()> why_gone = {})
      : ranks_(std::move(ranks)), why_gone_(std::move(why_gone)) {}

  RollCall roll(int64_t index, std::chrono::milliseconds time) const {
    return RollCall({.store = store_,
                     .group = "process group 'world'",
                     .ranks = ranks_,
                     .index = index,
                     .deadline = std::chrono::steady_clock::now() + time,
                     .advice = ". Look there",
                     .why_gone = why_gone_});
  }

  const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }

  // What each of `come` is told when it does `part`, by place in `come`.
  std::vector<std::string> told(
      const std::vector<int64_t>& come, std::chrono::milliseconds time,
      const std::function<void(RollCall& roll, int64_t index)>& part) const {
    std::vector<std::string> texts(come.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < come.size(); ++i) {
      threads.emplace_back([&, i] {
        texts[i] = message_of([&] {
          auto roll = this->roll(come[i], time);
          part(roll, come[i]);
        });
      });
    }
    for (auto& thread : threads) thread.join();
    return texts;
  }

 private:
  const c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
  const std::vector<int64_t> ranks_;
  const std::function<std::string()> why_gone_;
};

Presence on_node(int64_t index) {
  return {.host = "node" + std::to_string(index), .pid = 100 + index};
}

// Long before the time is up.
TEST(RollCall, OfARankThatIsGoneEndsOnAllThatAreThere) {
  const Members members({4, 7, 9}, [] { return "rank 7 has ended"; });
  const auto texts = members.told(
      {0, 2}, kLong, [](RollCall& roll, int64_t index) { roll.gather(on_node(index)); });
  EXPECT_THAT(texts, Each(HasSubstr("rank 7 has ended")));
}

// A kill may come between any two words to the store.
TEST(RollCall, OfARankThatIsGoneBeforeItWasCountedEndsOnAllThatAreThere) {
  const Members members({4, 7, 9}, [] { return "rank 7 has ended"; });
  members.store()->set("present/1", std::vector<uint8_t>{'x'});
  const auto texts = members.told(
      {0, 2}, kLong, [](RollCall& roll, int64_t index) { roll.gather(on_node(index)); });
  EXPECT_THAT(texts, Each(HasSubstr("rank 7 has ended")));
}

TEST(RollCall, OfARankThatIsGoneBeforeItsVerdictEndsOnAllThatAreThere) {
  const Members members({4, 7, 9}, [] { return "rank 7 has ended"; });
  members.store()->add("present/settled", 1);
  const auto texts = members.told(
      {0, 2}, kLong, [](RollCall& roll, int64_t index) { roll.gather(on_node(index)); });
  EXPECT_THAT(texts, Each(HasSubstr("rank 7 has ended")));
}

// Where nobody knows who is gone.
TEST(RollCall, OfAVerdictThatNeverComesEndsWhenTheTimeIsUp) {
  const Members members({4, 7, 9});
  members.store()->add("present/settled", 1);
  const auto texts = members.told(
      {0, 2}, kSoon, [](RollCall& roll, int64_t index) { roll.gather(on_node(index)); });
  EXPECT_THAT(texts, Each(HasSubstr("rank 7 has not come within 0.")));
}

TEST(RollCall, TellsEachMemberWhereAllAre) {
  const auto texts = Members({4, 7, 9}).told({0, 1, 2}, kLong, [](RollCall& roll, int64_t index) {
    const auto members = roll.gather(on_node(index));
    ASSERT_EQ(members.size(), 3U);
    for (int64_t i = 0; i < 3; ++i) {
      EXPECT_EQ(members[static_cast<size_t>(i)].host, on_node(i).host);
      EXPECT_EQ(members[static_cast<size_t>(i)].pid, on_node(i).pid);
    }
    roll.meet(RollCall::Stage::kReady);
    roll.meet(RollCall::Stage::kConnected);
  });
  EXPECT_THAT(texts, Each("nothing was thrown"));
}

TEST(RollCall, NamesWhoIsMissingAndWhoIsThereWhenTheTimeIsUp) {
  const auto texts = Members({4, 7, 9}).told(
      {0, 2}, kSoon, [](RollCall& roll, int64_t index) { roll.gather(on_node(index)); });
  EXPECT_THAT(texts,
              Each(AllOf(HasSubstr("process group 'world' of ranks 4, 7, 9 can not be made"),
                         HasSubstr("rank 7 has not come within 0."),
                         HasSubstr("there are: rank 4 (pid 100 on host 'node0'), rank 9 (pid 102"),
                         HasSubstr(". Look there"))));
}

TEST(RollCall, NamesWhoHasComeButNotConnected) {
  const auto texts = Members({0, 1}).told({0, 1}, kSoon, [](RollCall& roll, int64_t index) {
    roll.gather(on_node(index));
    if (index == 0) roll.meet(RollCall::Stage::kConnected);
  });
  EXPECT_THAT(texts[0], AllOf(HasSubstr("rank 1 has not connected to the others within 0."),
                              HasSubstr("rank 1 (pid 101 on host 'node1')")));
}

TEST(RollCall, WhatOneRankMeetsIsThrownOnAllAtOnce) {
  const auto texts = Members({0, 1, 2}).told({0, 1, 2}, kLong, [](RollCall& roll, int64_t index) {
    const auto own = roll.attempt([&] {
      TORCH_CHECK_VALUE(index != 1, "no such interface");
      return on_node(index);
    });
    roll.gather(own);
  });
  EXPECT_THAT(texts, Each(HasSubstr("rank 1: no such interface")));
}

TEST(RollCall, AMistakeIsAValueErrorOnTheOthersTooAndAFailureIsNot) {
  for (const bool mistake : {true, false}) {
    const Members members({0, 1});
    std::thread other([&] {
      auto roll = members.roll(1, kLong);
      EXPECT_ANY_THROW(roll.attempt([&] {
        TORCH_CHECK_VALUE(!mistake, "wrong");
        throw std::runtime_error("broken");
      }));
    });
    auto roll = members.roll(0, kLong);
    const auto come = [&] { roll.gather(on_node(0)); };
    if (mistake) {
      expect_error<c10::ValueError>(come, HasSubstr("rank 1: wrong"));
    } else {
      expect_error<c10::DistStoreError>(come, HasSubstr("rank 1: broken"));
    }
    other.join();
  }
}

// Else it would take the store along while the others still read there that all have
// come.
TEST(RollCall, TheProcessThatServesTheStoreLeavesLast) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto member = [&store](int64_t index) {
    return RollCall({.store = store,
                     .group = "process group 'world'",
                     .ranks = {0, 1},
                     .index = index,
                     .deadline = std::chrono::steady_clock::now() + kLong,
                     .serves_store = index == 0});
  };
  std::atomic<bool> other_leaves = false;
  std::thread other([&] {
    std::this_thread::sleep_for(kSoon);
    other_leaves = true;
    member(1).leave();
  });
  member(0).leave();
  EXPECT_TRUE(other_leaves);
  other.join();
}

TEST(RollCall, RanksWithDifferentWorldSizesBothLearnIt) {
  const Members members({0, 1});
  auto first = members.roll(0, kLong);
  first.agree("WORLD_SIZE", "2");
  auto second = members.roll(1, kLong);
  const auto both = AllOf(HasSubstr("rank 1: WORLD_SIZE=3, where rank 0 came with WORLD_SIZE=2"));
  expect_error<c10::ValueError>([&] { second.attempt([&] { second.agree("WORLD_SIZE", "3"); }); },
                                both);
  expect_error<c10::ValueError>([&] { first.gather(on_node(0)); }, both);
}

}  // namespace
}  // namespace fsdp::internal
