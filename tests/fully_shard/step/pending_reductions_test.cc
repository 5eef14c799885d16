#include "fully_shard/step/pending_reductions.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <set>
#include <vector>

namespace fsdp::internal {
namespace {

TEST(PendingReductions, AreInTheOrderOfTheFirstTouches) {
  PendingReductions<int> pending;
  for (int group : {2, 0, 1, 0, 2}) pending.touched(group);
  EXPECT_EQ(pending.in_order(), (std::vector<int>{2, 0, 1}));
}

TEST(PendingReductions, AreGoneWhenPaid) {
  PendingReductions<int> pending;
  for (int group : {0, 1, 2}) pending.touched(group);
  pending.reduced(1);
  EXPECT_FALSE(pending.contains(1));
  EXPECT_EQ(pending.in_order(), (std::vector<int>{0, 2}));
}

TEST(PendingReductions, FromBeforeAnEndComeFirstUntilTheyAreTouchedAgain) {
  PendingReductions<int> pending;
  for (int group : {0, 1, 2}) pending.touched(group);
  pending.backward_ended();
  pending.touched(3);
  pending.touched(1);
  EXPECT_EQ(pending.in_order(), (std::vector<int>{0, 2, 3, 1}));
}

TEST(PendingReductions, LeftByABackwardWithoutSynchronisationTakeNoPlaceAmongTheTouches) {
  PendingReductions<int> pending;
  pending.touched(1);
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
        pending.touched(event.group);
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
  for (int group = 0; group < kGroups; ++group) pending.touched(group);
  pending.backward_ended();
  for (int group = kGroups; group-- > 0;) {
    if (group % 2 == 0) pending.touched(group);
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
