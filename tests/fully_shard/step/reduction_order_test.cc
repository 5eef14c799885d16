// Pending reductions in the order of the first touches, and the order in which they
// leave: the same whatever has arrived, each group once, the last at the end.
#include "fully_shard/step/reduction_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <set>
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
          order.come_to(touch);
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
  order.come_to(0);
  order.come_to(1);
  EXPECT_TRUE(all_that_leave_now(order, nothing).empty());
  order.come_to(2);
  EXPECT_EQ(all_that_leave_now(order, nothing), std::vector<int>{0});
  EXPECT_TRUE(order.has_left(0));
  EXPECT_FALSE(order.has_left(1));
  order.come_to(3);
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
  order.come_to(7);
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
  order.come_to(2);  // 0 may leave
  order.remove(0);
  EXPECT_TRUE(all_that_leave_now(order, std::vector<bool>(4, false)).empty());
}

// It would take minutes if each look for a group's place went through all groups.
TEST(ReductionOrder, OfManyGroupsFindsEachAtOnce) {
  constexpr int kGroups = 400'000;
  Order order;
  for (int g = 0; g < kGroups; g += 2) order.add(g);
  for (int g = 0; g < kGroups; ++g) order.come_to(g);  // the odd ones get the last places
  std::vector<int> expected;
  for (const int first : {0, 1}) {
    for (int g = first; g < kGroups; g += 2) expected.push_back(g);
  }
  EXPECT_EQ(order.groups(), expected);
  EXPECT_EQ(all_that_leave_at_the_end(order), expected);
  for (int g = 0; g < kGroups; ++g) ASSERT_TRUE(order.has_left(g));
}

TEST(PendingReductions, AreInTheOrderOfTheFirstTouches) {
  PendingReductions<int> pending;
  for (int group : {2, 0, 1, 0, 2}) pending.add(group);
  EXPECT_EQ(pending.in_order(), (std::vector<int>{2, 0, 1}));
}

TEST(PendingReductions, AreGoneWhenPaid) {
  PendingReductions<int> pending;
  for (int group : {0, 1, 2}) pending.add(group);
  pending.reduced(1);
  EXPECT_FALSE(pending.contains(1));
  EXPECT_EQ(pending.in_order(), (std::vector<int>{0, 2}));
}

TEST(PendingReductions, FromBeforeAnEndComeFirstUntilTheyAreTouchedAgain) {
  PendingReductions<int> pending;
  for (int group : {0, 1, 2}) pending.add(group);
  pending.backward_ended();
  pending.add(3);
  pending.add(1);
  EXPECT_EQ(pending.in_order(), (std::vector<int>{0, 2, 3, 1}));
}

TEST(PendingReductions, LeftByABackwardWithoutSynchronisationTakeNoPlaceAmongTheTouches) {
  PendingReductions<int> pending;
  pending.add(1);
  pending.left_unreduced(0);
  pending.left_unreduced(1);
  EXPECT_EQ(pending.in_order(), (std::vector<int>{0, 1}));
}

struct Event {
  enum class Kind { kTouched, kLeftUnpaid, kPaid, kEnded } kind;
  int group;
};

std::vector<Event> all_events() {
  std::vector<Event> events{{Event::Kind::kEnded, 0}};
  for (const auto kind : {Event::Kind::kTouched, Event::Kind::kLeftUnpaid, Event::Kind::kPaid}) {
    for (int group = 0; group < 3; ++group) events.push_back({kind, group});
  }
  return events;
}

PendingReductions<int> after(const std::vector<Event>& events) {
  PendingReductions<int> pending;
  for (const auto& event : events) {
    switch (event.kind) {
      case Event::Kind::kTouched:
        pending.add(event.group);
        break;
      case Event::Kind::kLeftUnpaid:
        pending.left_unreduced(event.group);
        break;
      case Event::Kind::kPaid:
        pending.reduced(event.group);
        break;
      case Event::Kind::kEnded:
        pending.backward_ended();
        break;
    }
  }
  return pending;
}

// Who owes: whose last event is no payment.
std::set<int> owing(const std::vector<Event>& events) {
  std::set<int> groups;
  for (const auto& event : events) {
    if (event.kind == Event::Kind::kPaid) groups.erase(event.group);
    if (event.kind == Event::Kind::kTouched || event.kind == Event::Kind::kLeftUnpaid) {
      groups.insert(event.group);
    }
  }
  return groups;
}

// Touched since the last end of a backward, and not paid after: in the order of the first
// such touch.
std::vector<int> touched_lately(const std::vector<Event>& events) {
  std::vector<int> groups;
  for (const auto& event : events) {
    const bool known = std::count(groups.begin(), groups.end(), event.group) > 0;
    if (event.kind == Event::Kind::kEnded) groups.clear();
    if (event.kind == Event::Kind::kPaid) std::erase(groups, event.group);
    if (event.kind == Event::Kind::kTouched && !known) groups.push_back(event.group);
  }
  return groups;
}

void check(const std::vector<Event>& events) {
  const auto order = after(events).in_order();
  const auto late = touched_lately(events);
  ASSERT_EQ(std::set<int>(order.begin(), order.end()), owing(events));
  ASSERT_EQ(order.size(), owing(events).size()) << "twice";
  ASSERT_GE(order.size(), late.size());
  ASSERT_TRUE(std::equal(late.rbegin(), late.rend(), order.rbegin()));
}

void check_all(std::vector<Event>& events, size_t length) {
  check(events);
  if (events.size() == length) return;
  for (const auto& event : all_events()) {
    events.push_back(event);
    check_all(events, length);
    events.pop_back();
  }
}

TEST(PendingReductions, OfEverySequenceOfFiveEventsAreThoseOfItsHistory) {
  std::vector<Event> events;
  check_all(events, 5);
}

// It would take minutes if each look for a group went through all of them.
TEST(PendingReductions, OfManyGroupsAreFoundAtOnce) {
  constexpr int kGroups = 400'000;
  PendingReductions<int> pending;
  for (int group = 0; group < kGroups; ++group) pending.add(group);
  pending.backward_ended();
  for (int group = kGroups; group-- > 0;) {
    if (group % 2 == 0) pending.add(group);
    if (group % 3 == 0) pending.reduced(group);
  }
  std::vector<int> expected;
  for (int group = 0; group < kGroups; ++group) {
    if (group % 2 != 0 && group % 3 != 0) expected.push_back(group);
  }
  for (int group = kGroups; group-- > 0;) {
    if (group % 2 == 0 && group % 3 != 0) expected.push_back(group);
  }
  EXPECT_EQ(pending.in_order(), expected);
}

}  // namespace
}  // namespace fsdp::internal
