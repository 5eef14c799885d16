#include "fully_shard/step/debts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <set>
#include <vector>

namespace fsdp::internal {
namespace {

TEST(Debts, AreInTheOrderOfTheFirstTouches) {
  Debts<int> debts;
  for (int group : {2, 0, 1, 0, 2}) debts.touched(group);
  EXPECT_EQ(debts.in_order(), (std::vector<int>{2, 0, 1}));
}

TEST(Debts, AreGoneWhenPaid) {
  Debts<int> debts;
  for (int group : {0, 1, 2}) debts.touched(group);
  debts.paid(1);
  EXPECT_FALSE(debts.owes(1));
  EXPECT_EQ(debts.in_order(), (std::vector<int>{0, 2}));
}

TEST(Debts, FromBeforeAnEndComeFirstUntilTheyAreTouchedAgain) {
  Debts<int> debts;
  for (int group : {0, 1, 2}) debts.touched(group);
  debts.backward_ended();
  debts.touched(3);
  debts.touched(1);
  EXPECT_EQ(debts.in_order(), (std::vector<int>{0, 2, 3, 1}));
}

TEST(Debts, LeftByABackwardWithoutSynchronisationTakeNoPlaceAmongTheTouches) {
  Debts<int> debts;
  debts.touched(1);
  debts.left_unpaid(0);
  debts.left_unpaid(1);
  EXPECT_EQ(debts.in_order(), (std::vector<int>{0, 1}));
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

Debts<int> after(const std::vector<Event>& events) {
  Debts<int> debts;
  for (const auto& event : events) {
    switch (event.kind) {
      case Event::Kind::kTouched:
        debts.touched(event.group);
        break;
      case Event::Kind::kLeftUnpaid:
        debts.left_unpaid(event.group);
        break;
      case Event::Kind::kPaid:
        debts.paid(event.group);
        break;
      case Event::Kind::kEnded:
        debts.backward_ended();
        break;
    }
  }
  return debts;
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

TEST(Debts, OfEverySequenceOfFiveEventsAreThoseOfItsHistory) {
  std::vector<Event> events;
  check_all(events, 5);
}

// It would take minutes if each look for a group went through all of them.
TEST(Debts, OfManyGroupsAreFoundAtOnce) {
  constexpr int kGroups = 400'000;
  Debts<int> debts;
  for (int group = 0; group < kGroups; ++group) debts.touched(group);
  debts.backward_ended();
  for (int group = kGroups; group-- > 0;) {
    if (group % 2 == 0) debts.touched(group);
    if (group % 3 == 0) debts.paid(group);
  }
  std::vector<int> expected;
  for (int group = 0; group < kGroups; ++group) {
    if (group % 2 != 0 && group % 3 != 0) expected.push_back(group);
  }
  for (int group = kGroups; group-- > 0;) {
    if (group % 2 == 0 && group % 3 != 0) expected.push_back(group);
  }
  EXPECT_EQ(debts.in_order(), expected);
}

}  // namespace
}  // namespace fsdp::internal
