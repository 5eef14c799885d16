// The order of reductions: the same whatever has arrived, each group once, the last at
// the end.
#include "fully_shard/step/reduction_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace fsdp::internal {
namespace {

using Order = ReductionOrder<int>;

std::vector<int> all_that_leave_now(Order& order, const std::vector<bool>& complete) {
  std::vector<int> left;
  while (const int* group = order.next([&](int g) { return complete[static_cast<size_t>(g)]; })) {
    left.push_back(*group);
  }
  return left;
}

std::vector<int> all_that_leave_at_the_end(Order& order) {
  std::vector<int> left;
  while (const int* group = order.next_at_end()) left.push_back(*group);
  return left;
}

TEST(ReductionOrder, IsTheSameWhateverIsTouchedAndCompleteWhen) {
  for (int groups = 1; groups <= 4; ++groups) {
    std::vector<int> expected(static_cast<size_t>(groups));
    for (int g = 0; g < groups; ++g) expected[static_cast<size_t>(g)] = g;
    std::vector<int> touches = expected;
    do {
      for (int complete_bits = 0; complete_bits < 1 << groups; ++complete_bits) {
        Order order(expected);
        std::vector<bool> complete(static_cast<size_t>(groups), false);
        std::vector<int> left;
        for (const int touch : touches) {
          order.touched(touch);
          complete[static_cast<size_t>(touch)] = (complete_bits >> touch & 1) != 0;
          for (const int group : all_that_leave_now(order, complete)) left.push_back(group);
          EXPECT_LT(left.size(), expected.size()) << "the last waits for the end";
        }
        for (const int group : all_that_leave_at_the_end(order)) left.push_back(group);
        EXPECT_EQ(left, expected);
      }
    } while (std::next_permutation(touches.begin(), touches.end()));
  }
}

TEST(ReductionOrder, AnIncompleteGroupLeavesWhenTheSecondAfterItIsTouched) {
  const std::vector<bool> nothing(4, false);
  Order order({0, 1, 2, 3});
  order.touched(0);
  order.touched(1);
  EXPECT_TRUE(all_that_leave_now(order, nothing).empty());
  order.touched(2);
  EXPECT_EQ(all_that_leave_now(order, nothing), std::vector<int>{0});
  EXPECT_TRUE(order.has_left(0));
  EXPECT_FALSE(order.has_left(1));
  order.touched(3);
  EXPECT_EQ(all_that_leave_now(order, nothing), std::vector<int>{1});
}

TEST(ReductionOrder, ACompleteGroupWaitsForThoseBeforeIt) {
  std::vector<bool> complete{false, true, true, false};
  Order order({0, 1, 2, 3});
  EXPECT_TRUE(all_that_leave_now(order, complete).empty());
  complete[0] = true;
  EXPECT_EQ(all_that_leave_now(order, complete), (std::vector<int>{0, 1, 2}));
}

TEST(ReductionOrder, AGroupWithoutAPlaceGetsTheLast) {
  Order order({0, 1});
  order.touched(7);
  EXPECT_EQ(all_that_leave_at_the_end(order), (std::vector<int>{0, 1, 7}));
}

TEST(ReductionOrder, AGroupThatDiesLeavesTheOthersInPlace) {
  for (int dies = 0; dies < 4; ++dies) {
    for (int left_before = 0; left_before < 3; ++left_before) {
      Order order({0, 1, 2, 3});
      std::vector<bool> complete(4, false);
      for (int g = 0; g < left_before; ++g) complete[static_cast<size_t>(g)] = true;
      const auto left = all_that_leave_now(order, complete);
      ASSERT_EQ(left.size(), static_cast<size_t>(left_before));
      order.remove(dies);
      std::vector<int> expected;
      for (int g = left_before; g < 4; ++g) {
        if (g != dies) expected.push_back(g);
      }
      EXPECT_EQ(all_that_leave_at_the_end(order), expected);
    }
  }
}

TEST(ReductionOrder, AGroupThatDiesDoesNotForceAnother) {
  Order order({0, 1, 2, 3});
  order.touched(2);  // 0 may leave
  order.remove(0);
  EXPECT_TRUE(all_that_leave_now(order, std::vector<bool>(4, false)).empty());
}

// It would take minutes if each look for a group's place went through all groups.
TEST(ReductionOrder, OfManyGroupsFindsEachAtOnce) {
  constexpr int kGroups = 400'000;
  Order order;
  for (int g = 0; g < kGroups; g += 2) order.add(g);
  for (int g = 0; g < kGroups; ++g) order.touched(g);  // the odd ones get the last places
  std::vector<int> expected;
  for (const int first : {0, 1}) {
    for (int g = first; g < kGroups; g += 2) expected.push_back(g);
  }
  EXPECT_EQ(order.groups(), expected);
  EXPECT_EQ(all_that_leave_at_the_end(order), expected);
  for (int g = 0; g < kGroups; ++g) ASSERT_TRUE(order.has_left(g));
}

}  // namespace
}  // namespace fsdp::internal
