// The schedule alone: residency against the rules of docs/design/schedule.md, written
// down a second time (TurnModel), in every sequence of six touches of up to four units;
// then what is gathered ahead.
#include "fully_shard/schedule/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace fsdp::internal {
namespace {

constexpr UnitId kNone = -1;

struct Tree {
  std::vector<UnitId> parents;  // by unit, kNone for a root
  std::vector<UnitPolicy> policies;

  explicit Tree(std::vector<UnitId> of) : parents(std::move(of)), policies(parents.size()) {}
  bool above(UnitId a, UnitId b) const {
    for (b = parents[static_cast<size_t>(b)]; b != kNone; b = parents[static_cast<size_t>(b)]) {
      if (a == b) return true;
    }
    return false;
  }
};

// Runs a schedule the way the runtime does; a prefetch is issued when asked for.
class Driven {
 public:
  explicit Driven(const Tree& tree, bool prefetches) : prefetches_(prefetches) {
    for (size_t u = 0; u < tree.parents.size(); ++u) {
      schedule.add(static_cast<UnitId>(u), tree.policies[u]);
    }
    for (size_t u = 0; u < tree.parents.size(); ++u) {
      if (tree.parents[u] != kNone) schedule.set_parent(static_cast<UnitId>(u), tree.parents[u]);
    }
  }

  void touch(UnitId unit, Pass pass) {
    gathered = 0;
    prefetched.clear();
    const bool was_resident = resident.contains(unit);
    if (was_resident && schedule.is_current(unit, pass)) return;
    const auto decision = schedule.touched(unit, pass);
    apply(decision);
    if (!was_resident && !ahead.contains(unit)) ++gathered;
    ahead.erase(unit);
    resident.insert(unit);
    if (!prefetches_) return;
    for (const auto next : decision.prefetch) {
      EXPECT_FALSE(resident.contains(next) || ahead.contains(next));
      ahead.insert(next);
      prefetched.push_back(next);
      schedule.unsharded(next);
    }
  }
  void end_backward(bool is_last = true) { apply(schedule.backward_ended(is_last)); }
  void unshard(UnitId unit) {
    resident.insert(unit);
    schedule.unsharded_explicitly(unit);
  }

  Schedule schedule;
  std::set<UnitId> resident, ahead;
  std::vector<UnitId> prefetched;
  int gathered = 0;
  int unused = 0;

 private:
  void apply(const Decision& decision) {
    for (const auto unit : decision.drop) {
      if (ahead.erase(unit) == 0) continue;
      ++unused;
      schedule.emptied(unit);
    }
    for (const auto unit : decision.reshard) {
      if (resident.erase(unit) != 0) schedule.emptied(unit);
    }
  }
  bool prefetches_;
};

// Turns, as simply as they can be said.
class TurnModel {
 public:
  explicit TurnModel(const Tree& tree) : tree_(tree) {}

  void touch(UnitId unit, Pass pass) {
    const auto kind = kind_of(pass);
    if (kind != kind_) begin(kind, unit);
    if (unit != current_) enter(unit);
    turn[unit] = pass == Pass::kRecompute ? "open" : "in turn";
  }
  void end_backward(bool is_last) {
    std::erase_if(turn, [&](const auto& item) {
      return is_last && policy(item.first).reshard_after_backward;
    });
    for (auto& [unit, state] : turn) state = "waiting";
    for (auto& [key, count] : visits_) {
      if (key.first == PassKind::kTraining && count > 0) last_visits_[key] = count, count = 0;
    }
    kind_.reset();
    current_.reset();
  }
  void unshard(UnitId unit) { turn[unit] = "waiting"; }

  std::map<UnitId, std::string> turn;  // of resident units

 private:
  const UnitPolicy& policy(UnitId unit) const { return tree_.policies[static_cast<size_t>(unit)]; }
  bool is_root(UnitId unit) const { return tree_.parents[static_cast<size_t>(unit)] == kNone; }
  bool goes(UnitId unit, PassKind kind) const {
    if (kind == PassKind::kBackward) return policy(unit).reshard_after_backward;
    return policy(unit).reshard_after_forward.value_or(!is_root(unit));
  }
  bool is_explicit_ancestor(UnitId unit) const {
    if (policy(unit).reshard_after_forward != true) return false;
    for (size_t u = 0; u < tree_.parents.size(); ++u) {
      if (tree_.above(unit, static_cast<UnitId>(u))) return true;
    }
    return false;
  }

  void begin(PassKind kind, UnitId entered) {
    std::erase_if(turn, [&](const auto& item) {
      const auto& [unit, state] = item;
      if (unit == entered || state == "waiting") return false;
      if (kind_ == PassKind::kInference && goes(unit, PassKind::kInference)) return true;
      return kind_ == PassKind::kTraining && unit != current_ && is_explicit_ancestor(unit);
    });
    for (auto& [unit, state] : turn) state = "waiting";
    if (kind == PassKind::kInference) end_round(kind);
    kind_ = kind;
    current_.reset();
    first_ = entered;
  }
  void end_round(PassKind kind) {
    for (auto& [key, count] : visits_) {
      if (key.first == kind && count > 0) last_visits_[key] = count, count = 0;
    }
  }
  void enter(UnitId unit) {
    const bool forward = *kind_ != PassKind::kBackward;
    for (auto item = turn.begin(); item != turn.end();) {
      auto& [other, state] = *item;
      if (other == unit) {
        ++item;
        continue;
      }
      const bool related = tree_.above(other, unit) || tree_.above(unit, other);
      const auto key = std::pair(*kind_, other);
      const bool visited_enough = forward && is_explicit_ancestor(other) &&
                                  last_visits_.contains(key) && visits_[key] >= last_visits_[key];
      if (state == "in turn" && (!related || visited_enough)) state = "over";
      item = state == "over" && goes(other, *kind_) ? turn.erase(item) : std::next(item);
    }
    if (*kind_ == PassKind::kInference && current_ && unit == first_) end_round(*kind_);
    ++visits_[{*kind_, unit}];
    current_ = unit;
  }

  const Tree& tree_;
  std::optional<PassKind> kind_;
  std::optional<UnitId> current_, first_;
  std::map<std::pair<PassKind, UnitId>, int> visits_, last_visits_;
};

std::set<UnitId> residents(const TurnModel& model) {
  std::set<UnitId> units;
  for (const auto& [unit, state] : model.turn) units.insert(unit);
  return units;
}

// An event is a touch (unit, pass), the end of a backward, or unshard() by hand.
struct Event {
  UnitId unit;
  std::optional<Pass> pass;  // none: the end of a backward (unit is kNone), or by hand
};

std::string describe(const std::vector<Event>& events) {
  std::string text;
  for (const auto& [unit, pass] : events) {
    text += pass ? "touch " + std::to_string(unit) + " in pass " +
                       std::to_string(static_cast<int>(*pass))
                 : (unit == kNone ? "end" : "unshard " + std::to_string(unit));
    text += "; ";
  }
  return text;
}

void compare(const Tree& tree, const std::vector<Event>& events) {
  Driven driven(tree, /*prefetches=*/false);
  TurnModel model(tree);
  for (const auto& [unit, pass] : events) {
    if (pass) {
      driven.touch(unit, *pass);
      model.touch(unit, *pass);
    } else if (unit == kNone) {
      driven.end_backward();
      model.end_backward(true);
    } else {
      driven.unshard(unit);
      model.unshard(unit);
    }
    ASSERT_EQ(driven.resident, residents(model)) << describe(events);
  }
}

constexpr Pass kPasses[] = {Pass::kTraining, Pass::kInference, Pass::kCheckpointed,
                            Pass::kRecompute, Pass::kBackward};

std::vector<Tree> trees() {
  return {Tree({kNone}),       Tree({kNone, kNone}),   Tree({kNone, 0}),
          Tree({2, 2, kNone}), Tree({3, 3, 3, kNone}), Tree({1, 3, 3, kNone})};
}

TEST(Schedule, KeepsAndEvictsByTheRulesInEverySequenceOfTouches) {
  for (auto tree : trees()) {
    const auto units = static_cast<UnitId>(tree.parents.size());
    const int depth = units <= 2 ? 4 : 3;
    std::vector<Event> events;
    const std::function<void(int)> explore = [&](int left) {
      if (::testing::Test::HasFatalFailure()) return;
      if (left == 0) return compare(tree, events);
      for (UnitId unit = 0; unit < units; ++unit) {
        for (const auto pass : kPasses) {
          events.push_back({unit, pass});
          explore(left - 1);
          events.pop_back();
        }
      }
      events.push_back({kNone, std::nullopt});
      explore(left - 1);
      events.pop_back();
    };
    explore(depth);
  }
}

TEST(Schedule, KeepsAndEvictsByTheRulesInRandomSequencesUnderAllPolicies) {
  std::mt19937 random(1);
  const auto draw = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int round = 0; round < 5000 && !::testing::Test::HasFatalFailure(); ++round) {
    auto tree = trees()[static_cast<size_t>(draw(6))];
    for (auto& policy : tree.policies) {
      const int forward = draw(3);
      if (forward != 2) policy.reshard_after_forward = forward == 1;
      policy.reshard_after_backward = draw(3) != 0;
    }
    std::vector<Event> events;
    Pass pass = Pass::kTraining;
    for (int i = 0; i < 24; ++i) {
      const auto unit = static_cast<UnitId>(draw(static_cast<int>(tree.parents.size())));
      if (draw(4) == 0) pass = kPasses[draw(5)];
      const int kind = draw(12);
      if (kind == 0) {
        events.push_back({kNone, std::nullopt});
      } else if (kind == 1) {
        events.push_back({unit, std::nullopt});
      } else {
        events.push_back({unit, pass});
      }
    }
    compare(tree, events);
  }
}

// Four blocks and their root, as a training step touches them.
constexpr UnitId kRoot = 4;
const std::vector<UnitId> kForward{kRoot, 0, 1, 2, 3, kRoot};
const std::vector<UnitId> kBackward{kRoot, 3, 2, 1, 0};

Tree blocks() { return Tree({kRoot, kRoot, kRoot, kRoot, kNone}); }

int run(Driven& driven, const std::vector<UnitId>& units, Pass pass) {
  int gathered = 0;
  for (const auto unit : units) {
    driven.touch(unit, pass);
    gathered += driven.gathered + static_cast<int>(driven.prefetched.size());
  }
  return gathered;
}

std::vector<int> step(Driven& driven) {
  std::vector<int> gathered{run(driven, kForward, Pass::kTraining),
                            run(driven, kBackward, Pass::kBackward)};
  driven.end_backward();
  return gathered;
}

TEST(Schedule, GathersABlockTwiceAStepAndTheRootOnce) {
  const auto tree = blocks();
  Driven driven(tree, /*prefetches=*/true);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(step(driven), (std::vector<int>{5, 3}));
    EXPECT_TRUE(driven.resident.empty());
  }
  EXPECT_EQ(driven.unused, 0);
}

TEST(Schedule, GathersAKeptBlockOnce) {
  auto tree = blocks();
  for (auto& policy : tree.policies) policy.reshard_after_forward = false;
  Driven driven(tree, /*prefetches=*/true);
  EXPECT_EQ(step(driven), (std::vector<int>{5, 0}));
  EXPECT_EQ(run(driven, kForward, Pass::kInference), 5);
  EXPECT_EQ(run(driven, kForward, Pass::kInference), 0);
  EXPECT_EQ(step(driven), (std::vector<int>{0, 0}));
}

TEST(Schedule, AnExplicitTrueReshardsTheRootInTheMiddleOfItsForwardOnceItsPlaceIsKnown) {
  auto tree = Tree({5, 5, 5, 5, 5, kNone});  // 4: a head after the root's last parameter
  tree.policies[5].reshard_after_forward = true;
  const std::vector<UnitId> forward{5, 0, 1, 2, 3, 5, 4};
  const std::vector<UnitId> backward{4, 5, 3, 2, 1, 0};
  Driven driven(tree, /*prefetches=*/false);
  for (int i = 0; i < 2; ++i) {
    run(driven, forward, Pass::kTraining);
    EXPECT_EQ(driven.resident.contains(5), i == 0) << "unknown in the first step";
    EXPECT_EQ(run(driven, backward, Pass::kBackward), 5) << "the head stayed";
    driven.end_backward();
  }
}

TEST(Schedule, GathersAheadWhatFollowedLastTime) {
  const auto tree = blocks();
  Driven driven(tree, /*prefetches=*/true);
  driven.touch(kRoot, Pass::kTraining);
  EXPECT_TRUE(driven.prefetched.empty()) << "nothing was made after the root";
  driven.touch(0, Pass::kTraining);
  EXPECT_EQ(driven.prefetched, std::vector<UnitId>{1}) << "in the order of registration";
  run(driven, {1, 2, 3, kRoot}, Pass::kTraining);
  driven.touch(kRoot, Pass::kBackward);
  EXPECT_TRUE(driven.prefetched.empty()) << "nothing is known of a backward yet";
  run(driven, {3, 2, 1, 0}, Pass::kBackward);
  driven.end_backward();
  driven.touch(kRoot, Pass::kTraining);
  EXPECT_EQ(driven.prefetched, std::vector<UnitId>{0});
  run(driven, {0, 1, 2, 3, kRoot}, Pass::kTraining);
  driven.touch(kRoot, Pass::kBackward);
  EXPECT_TRUE(driven.prefetched.empty()) << "the last block is still there";
  driven.touch(3, Pass::kBackward);
  EXPECT_EQ(driven.prefetched, std::vector<UnitId>{2});
}

TEST(Schedule, AGuessThatDoesNotComeTrueIsDroppedTwoUnitsLater) {
  const auto tree = Tree({4, 4, 4, 4, kNone});
  Driven driven(tree, /*prefetches=*/true);
  driven.touch(0, Pass::kTraining);  // guesses 1
  driven.touch(2, Pass::kTraining);
  EXPECT_TRUE(driven.ahead.contains(1));
  driven.touch(3, Pass::kTraining);
  EXPECT_FALSE(driven.ahead.contains(1));
  EXPECT_EQ(driven.unused, 1);
}

TEST(Schedule, TellsOfTrainingForwardsInAnotherOrder) {
  const auto tree = Tree({3, 3, 3, kNone});
  Driven driven(tree, /*prefetches=*/false);
  const auto step = [&driven](const std::vector<UnitId>& units) {
    run(driven, units, Pass::kTraining);
    driven.touch(units.back(), Pass::kBackward);
    driven.end_backward();
    return driven.schedule.take_order_change();
  };
  EXPECT_EQ(step({0, 1, 2}), std::nullopt) << "nothing is known of an order yet";
  EXPECT_EQ(step({0, 1, 2}), std::nullopt);
  run(driven, {2, 1, 0}, Pass::kInference);
  EXPECT_EQ(step({0, 1, 2}), std::nullopt) << "an evaluation has an order of its own";
  EXPECT_EQ(step({0, 2, 1}), (OrderChange{.unit = 0, .before = 1, .now = 2}));
  EXPECT_EQ(driven.schedule.take_order_change(), std::nullopt) << "it was taken";
  EXPECT_EQ(step({0, 2}), std::nullopt) << "it ended earlier";
}

// Microbatches of a pipeline; a network that is run twice for one loss.
TEST(Schedule, TellsOfNoOtherOrderWhereSeveralForwardsRunBeforeABackward) {
  const auto tree = Tree({3, 3, 3, kNone});
  Driven driven(tree, /*prefetches=*/false);
  const auto step = [&driven](const std::vector<UnitId>& units, int64_t forwards) {
    for (int64_t i = 0; i < forwards; ++i) run(driven, units, Pass::kTraining);
    for (int64_t i = 0; i < forwards; ++i) {
      driven.touch(units.back(), Pass::kBackward);
      driven.end_backward();
    }
    return driven.schedule.take_order_change();
  };
  for (const int64_t forwards : {2, 2, 1, 3, 1})
    EXPECT_EQ(step({0, 1, 2}, forwards), std::nullopt) << forwards;
  EXPECT_EQ(step({0, 2, 1}, 2), (OrderChange{.unit = 0, .before = 1, .now = 2}));
}

TEST(Schedule, AListReplacesTheGuessAndIsDroppedWhenTheKindChanges) {
  const auto tree = Tree({4, 4, 4, 4, kNone});
  Driven driven(tree, /*prefetches=*/true);
  driven.schedule.set_prefetch_list(0, /*backward=*/false, {2, 3});
  driven.touch(0, Pass::kTraining);
  EXPECT_EQ(driven.prefetched, (std::vector<UnitId>{2, 3}));
  driven.touch(3, Pass::kTraining);
  driven.touch(1, Pass::kTraining);
  EXPECT_TRUE(driven.ahead.contains(2));
  driven.touch(1, Pass::kBackward);
  EXPECT_FALSE(driven.ahead.contains(2));
}

TEST(Schedule, WhatIsGatheredAheadAgainIsDroppedAgain) {
  const auto tree = Tree({4, 4, 4, 4, kNone});
  Driven driven(tree, /*prefetches=*/true);
  driven.schedule.set_prefetch_list(0, /*backward=*/false, {1});
  for (int64_t round = 1; round <= 2; ++round) {
    driven.touch(0, Pass::kTraining);
    EXPECT_TRUE(driven.ahead.contains(1)) << round;
    driven.touch(0, Pass::kBackward);
    EXPECT_FALSE(driven.ahead.contains(1)) << round;
  }
}

TEST(Schedule, AUnitThatIsNotToBeUnshardedInBackwardIsNotGatheredAheadThere) {
  auto tree = blocks();
  tree.policies[2].prefetch_in_backward = false;
  Driven driven(tree, /*prefetches=*/true);
  step(driven);
  run(driven, kForward, Pass::kTraining);
  driven.touch(kRoot, Pass::kBackward);
  driven.touch(3, Pass::kBackward);
  EXPECT_TRUE(driven.prefetched.empty());
  driven.touch(2, Pass::kBackward);
  EXPECT_EQ(driven.prefetched, std::vector<UnitId>{1});
}

TEST(Schedule, WhatAUnitPutsOffIsChosenOnceWhenAskedFor) {
  auto tree = blocks();
  Driven driven(tree, /*prefetches=*/true);
  step(driven);
  run(driven, kForward, Pass::kTraining);
  EXPECT_FALSE(driven.schedule.put_off_by());
  tree.policies[3].prefetch_after_gradients = true;
  driven.touch(kRoot, Pass::kBackward);
  driven.touch(3, Pass::kBackward);
  EXPECT_TRUE(driven.prefetched.empty());
  EXPECT_EQ(driven.schedule.put_off_by(), 3);
  EXPECT_EQ(driven.schedule.take_put_off(), std::vector<UnitId>{2});
  EXPECT_FALSE(driven.schedule.put_off_by());
  EXPECT_TRUE(driven.schedule.take_put_off().empty());
  driven.touch(2, Pass::kBackward);
  EXPECT_FALSE(driven.schedule.put_off_by()) << "each unit has its own policy";
}

TEST(Schedule, NothingIsPutOffBeyondTheBackward) {
  auto tree = blocks();
  for (auto& policy : tree.policies) policy.prefetch_after_gradients = true;
  Driven driven(tree, /*prefetches=*/true);
  step(driven);
  run(driven, kForward, Pass::kTraining);
  EXPECT_FALSE(driven.schedule.put_off_by()) << "a forward gathers ahead at once";
  driven.touch(3, Pass::kBackward);
  driven.end_backward();
  EXPECT_FALSE(driven.schedule.put_off_by());
  EXPECT_TRUE(driven.schedule.take_put_off().empty());
}

TEST(Schedule, ABackwardThatIsNotTheLastEmptiesNothing) {
  auto tree = blocks();
  for (auto& policy : tree.policies) policy.reshard_after_forward = false;
  Driven driven(tree, /*prefetches=*/false);
  run(driven, kForward, Pass::kTraining);
  run(driven, kBackward, Pass::kBackward);
  driven.end_backward(/*is_last=*/false);
  EXPECT_FALSE(driven.resident.empty());
  EXPECT_EQ(run(driven, {0}, Pass::kTraining), 0) << "the first touched in the next forward";
}

TEST(Schedule, ATouchElsewhereEndsTheTurnOfTheRootOnly) {
  auto tree = Tree({1, kNone});
  tree.policies[1].reshard_after_forward = true;
  Driven driven(tree, /*prefetches=*/false);
  driven.touch(1, Pass::kTraining);
  driven.touch(0, Pass::kTraining);
  EXPECT_EQ(driven.schedule.touched_elsewhere().reshard, std::vector<UnitId>{1});
}

TEST(Schedule, WhatAnAbsorbedRootLearnedStays) {
  const auto tree = Tree({kNone, kNone, kNone});
  Schedule below, above;
  below.add(0, tree.policies[0]);
  below.add(1, tree.policies[1]);
  above.add(2, tree.policies[2]);
  below.touched(1, Pass::kTraining);
  below.touched(0, Pass::kTraining);
  below.backward_ended(true);
  below.emptied(0);
  below.emptied(1);
  above.absorb(std::move(below));
  EXPECT_EQ(above.touched(1, Pass::kTraining).prefetch, std::vector<UnitId>{0});
}

TEST(Schedule, ForgettingLeavesTheOrderOfRegistration) {
  const auto tree = blocks();
  Driven driven(tree, /*prefetches=*/true);
  run(driven, {0, 2, 0, 2}, Pass::kTraining);
  driven.end_backward();
  driven.schedule.forget();
  driven.touch(0, Pass::kTraining);
  EXPECT_EQ(driven.prefetched, std::vector<UnitId>{1});
}

TEST(Schedule, AUnitThatIsGoneIsGatheredAheadNeitherByRegistrationNorByAList) {
  const auto tree = blocks();
  Driven driven(tree, /*prefetches=*/true);
  driven.schedule.set_prefetch_list(2, /*backward=*/false, {1, 3});
  driven.schedule.remove(1);
  driven.touch(0, Pass::kTraining);
  EXPECT_EQ(driven.prefetched, std::vector<UnitId>{2});
  driven.touch(2, Pass::kTraining);
  EXPECT_EQ(driven.prefetched, std::vector<UnitId>{3});
}

TEST(Schedule, AUnitThatIsGoneIsGatheredAheadNeitherInBackwardNorAsWhatFollowedLastTime) {
  const auto tree = blocks();
  Driven driven(tree, /*prefetches=*/true);
  driven.schedule.set_prefetch_list(3, /*backward=*/true, {1, 2});
  run(driven, {0, 2, 0, 2}, Pass::kTraining);
  driven.end_backward();
  driven.schedule.remove(1);
  driven.touch(3, Pass::kBackward);
  EXPECT_EQ(std::ranges::count(driven.prefetched, UnitId{1}), 0);
  driven.end_backward();
  driven.schedule.remove(2);
  driven.touch(0, Pass::kTraining);
  EXPECT_EQ(driven.prefetched, std::vector<UnitId>{3});
}

}  // namespace
}  // namespace fsdp::internal
