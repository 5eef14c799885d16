#include "device_mesh/collectives/wait_graph.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace fsdp::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Ranks = std::map<int64_t, RankWaits>;

ThreadWait wait_for(int64_t rank, const std::string& lane, uint64_t operation,
                    uint64_t thread = 1) {
  return {.thread = thread,
          .wait = 10 + thread,
          .operation = operation,
          .for_rank = rank,
          .lane = lane,
          .what = lane + " of something"};
}

// A rank of one thread, which has issued so much.
RankWaits waiting(const ThreadWait& wait, std::vector<LaneProgress> lanes = {}) {
  return {.waits = {wait}, .lanes = std::move(lanes), .threads = {wait.thread}};
}

std::vector<StuckThread> stuck_in(const Ranks& ranks, int64_t rank, size_t wait = 0) {
  return stuck_with(rank, ranks.at(rank).waits[wait], [&](int64_t other) {
    const auto found = ranks.find(other);
    return found == ranks.end() ? std::nullopt : std::optional(found->second);
  });
}

TEST(WaitGraph, TwoRanksThatWaitForOneAnotherAreStuckAndNamed) {
  const Ranks ranks = {{0, waiting(wait_for(1, "gather", 7), {{7, {1}, "gather"}})},
                       {1, waiting(wait_for(0, "reduce", 3), {{6, {1}, "gather"}})}};
  for (const int64_t rank : {0, 1}) {
    const auto stuck = stuck_in(ranks, rank);
    EXPECT_EQ(stuck.size(), 2u);
    const auto verdict = verdict_on(stuck);
    EXPECT_THAT(verdict.text, AllOf(HasSubstr("out of order"),
                                    HasSubstr("rank 0 waits in the gather of something "
                                              "(operation 7 of its group), which rank 1 has not"),
                                    HasSubstr("rank 1 waits in the reduce of something"),
                                    HasSubstr("set_reshard_after_backward(false)")));
    EXPECT_TRUE(verdict.covers("gather") && verdict.covers("reduce"));
  }
}

TEST(WaitGraph, WhoDoesSomethingElseMayStillCome) {
  EXPECT_TRUE(stuck_in({{0, waiting(wait_for(1, "gather", 7))}}, 0).empty()) << "computes";
  Ranks ranks = {{0, waiting(wait_for(1, "gather", 7))}, {1, waiting(wait_for(0, "reduce", 3))}};
  ranks[1].threads.push_back(2);  // which issues, and does not wait
  EXPECT_TRUE(stuck_in(ranks, 0).empty());
  ranks[1].lanes = {{6, {1}, "gather"}};  // but another thread issued here
  EXPECT_FALSE(stuck_in(ranks, 0).empty());
  ranks[1].lanes[0].threads.push_back(2);
  EXPECT_TRUE(stuck_in(ranks, 0).empty());
}

TEST(WaitGraph, WhatWasIssuedIsOnItsWay) {
  const Ranks ranks = {{0, waiting(wait_for(1, "gather", 7), {{7, {1}, "gather"}})},
                       {1, waiting(wait_for(0, "reduce", 3), {{7, {1}, "gather"}})}};
  EXPECT_TRUE(stuck_in(ranks, 0).empty());
  EXPECT_TRUE(stuck_in(ranks, 1).empty());
}

TEST(WaitGraph, ACircleOfThreeHoldsWhoWaitsBehindIt) {
  Ranks ranks;
  for (const int64_t rank : {0, 1, 2})
    ranks[rank] = waiting(wait_for((rank + 1) % 3, "lane " + std::to_string(rank), 1));
  ranks[3] = waiting(wait_for(1, "lane 3", 5));
  EXPECT_EQ(stuck_in(ranks, 2).size(), 3u);
  EXPECT_EQ(stuck_in(ranks, 3).size(), 4u);
  ranks.erase(2);
  for (const int64_t rank : {0, 1, 3}) EXPECT_TRUE(stuck_in(ranks, rank).empty()) << rank;
}

TEST(WaitGraph, AVerdictOnALaneIsForEver) {
  Ranks ranks = {{0, waiting(wait_for(1, "gather", 7))}, {1, {.verdict = {"why", {"reduce"}}}}};
  EXPECT_TRUE(stuck_in(ranks, 0).empty());
  ranks[1].verdict.lanes.push_back("gather");
  EXPECT_FALSE(stuck_in(ranks, 0).empty());
  ranks[1].lanes = {{7, {}, "gather"}};
  EXPECT_TRUE(stuck_in(ranks, 0).empty()) << "it issued this one before";
}

TEST(WaitGraph, WhatIsToldArrivesAsItWas) {
  const RankWaits told{.beat = 5,
                       .waits = {wait_for(1, "a lane/1/of 0, 1", 7), wait_for(3, "b", 8, 2)},
                       .lanes = {{7, {1, 2}, "a lane/1/of 0, 1"}, {0, {}, "b"}},
                       .threads = {1, 2, 9},
                       .verdict = {"rank 0 waits in 'x'; rank 1 in 'y'", {"b", "a lane"}}};
  EXPECT_EQ(parse_rank_waits(to_text(told)), told);
  EXPECT_EQ(parse_rank_waits(to_text(RankWaits{})), RankWaits{});
  EXPECT_FALSE(parse_rank_waits("something else").has_value());
  EXPECT_FALSE(parse_rank_waits("lane 1 99999999999 x").has_value());
}

// Ranks of one thread each, which issue on lanes of two or all ranks, one operation after
// another.
class Simulation {
 public:
  explicit Simulation(std::mt19937& random) : random_(random) {
    for (auto& program : programs_) {
      program.resize(draw(1, 4));
      for (auto& lane : program) lane = draw(0, kLanes - 1);
    }
  }

  bool can_step(int64_t rank) const { return !has_ended(rank) && !blocked_on(rank); }
  // Goes on to what is issued next.
  void step(int64_t rank) {
    const auto place = static_cast<size_t>(rank);
    if (waits_[place]) ++at_[place];
    waits_[place] = at_[place] < programs_[place].size();
    if (waits_[place]) ++issued_[place][programs_[place][at_[place]]];
  }
  bool has_ended(int64_t rank) const {
    const auto place = static_cast<size_t>(rank);
    return at_[place] == programs_[place].size();
  }
  // The rank that it waits for, if any.
  std::optional<int64_t> blocked_on(int64_t rank) const {
    const auto place = static_cast<size_t>(rank);
    if (!waits_[place]) return std::nullopt;
    const auto lane = programs_[place][at_[place]];
    for (int64_t other = 0; other < kRanks; ++other) {
      if (takes_part(other, lane) && takes_part(rank, lane) &&
          issued_[static_cast<size_t>(other)][lane] < issued_[place][lane])
        return other;
    }
    return std::nullopt;
  }
  Ranks told() const {
    Ranks ranks;
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      const auto place = static_cast<size_t>(rank);
      RankWaits waits{.threads = {1}};
      for (size_t lane = 0; lane < kLanes; ++lane)
        waits.lanes.push_back({issued_[place][lane], {}, name(lane)});
      if (const auto other = blocked_on(rank)) {
        const auto lane = programs_[place][at_[place]];
        waits.waits = {wait_for(*other, name(lane), issued_[place][lane])};
      }
      ranks[rank] = std::move(waits);
    }
    return ranks;
  }
  size_t draw(size_t least, size_t most) {
    return std::uniform_int_distribution<size_t>(least, most)(random_);
  }
  static constexpr int64_t kRanks = 3;

 private:
  static constexpr size_t kLanes = 4;
  static std::string name(size_t lane) { return "lane " + std::to_string(lane); }
  // Lane 0 has all ranks, the others lack one each.
  static bool takes_part(int64_t rank, size_t lane) {
    return lane == 0 || static_cast<size_t>(rank) + 1 != lane;
  }

  std::mt19937& random_;
  std::vector<size_t> programs_[kRanks];
  size_t at_[kRanks] = {};
  bool waits_[kRanks] = {};
  uint64_t issued_[kRanks][kLanes] = {};
};

// Of a rank that is stuck at some time nothing more is ever heard; and whoever waits at
// the end, other than for one that has ended, is stuck.
TEST(WaitGraph, SaysOfRandomProgramsExactlyWhatCanNotEnd) {
  std::mt19937 random(7);
  int64_t deadlocks = 0;
  for (int program = 0; program < 3000; ++program) {
    Simulation simulation(random);
    std::vector<int64_t> stuck;
    while (true) {
      const auto told = simulation.told();
      for (const auto& [rank, waits] : told) {
        if (!waits.waits.empty() && !stuck_in(told, rank).empty()) stuck.push_back(rank);
      }
      std::vector<int64_t> ready;
      for (int64_t rank = 0; rank < Simulation::kRanks; ++rank) {
        if (simulation.can_step(rank)) ready.push_back(rank);
      }
      if (ready.empty()) break;
      simulation.step(ready[simulation.draw(0, ready.size() - 1)]);
    }
    for (const auto rank : stuck) ASSERT_TRUE(simulation.blocked_on(rank)) << program;
    const auto told = simulation.told();
    for (const auto& [rank, waits] : told) {
      auto at = rank;  // follow the waits: round in a circle, or to one that has ended
      for (int steps = 0; steps < 4 && simulation.blocked_on(at); ++steps)
        at = *simulation.blocked_on(at);
      if (waits.waits.empty()) continue;
      const bool in_circle = simulation.blocked_on(at).has_value();
      ASSERT_EQ(!stuck_in(told, rank).empty(), in_circle) << program << " rank " << rank;
      deadlocks += in_circle;
    }
  }
  EXPECT_GT(deadlocks, 300);
}

}  // namespace
}  // namespace fsdp::internal
