#include "dtensor/strategy/bounded_memo.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>

namespace fsdp::internal {
namespace {

TEST(BoundedMemo, FindsByEqualKeys) {
  BoundedMemo<std::string> memo(8);
  EXPECT_EQ(memo.find({1, 2}), nullptr);
  memo.remember({1, 2}, "a");
  memo.remember({2, 1}, "b");
  memo.remember({1, 2, 0}, "c");
  EXPECT_EQ(*memo.find({1, 2}), "a");
  EXPECT_EQ(*memo.find({2, 1}), "b");
  EXPECT_EQ(*memo.find({1, 2, 0}), "c");
}

TEST(BoundedMemo, ForgetsEverythingWhenItIsFull) {
  BoundedMemo<int> memo(3);
  const auto first = memo.remember({0}, 7);
  for (int64_t i = 1; i < 20; ++i) {
    memo.remember({i}, static_cast<int>(i));
    EXPECT_LE(memo.size(), 3U);
    EXPECT_EQ(*memo.find({i}), i);
  }
  EXPECT_EQ(memo.find({0}), nullptr);
  EXPECT_EQ(*first, 7);
}

TEST(BoundedMemo, ThreadsMayShareOne) {
  BoundedMemo<int64_t> memo(4);
  const auto work = [&memo] {
    for (int64_t i = 0; i < 2000; ++i) {
      const auto known = memo.find({i % 7});
      EXPECT_EQ(known ? *known : *memo.remember({i % 7}, i % 7), i % 7);
    }
  };
  std::thread other(work);
  work();
  other.join();
}

}  // namespace
}  // namespace fsdp::internal
