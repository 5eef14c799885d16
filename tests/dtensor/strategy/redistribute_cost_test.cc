#include "dtensor/strategy/propagate.h"
#include "tests/dtensor/strategy/placements.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace fsdp::internal {
namespace {

const std::vector<PlacementStrategy> kProduct = {{{kRows}, {kRows, kWhole}},
                                                 {{kColumns}, {kWhole, kColumns}},
                                                 {{kTerms}, {kColumns, kRows}},
                                                 {{kTerms}, {kTerms, kWhole}},
                                                 {{kTerms}, {kWhole, kTerms}}};

std::string chosen(const std::vector<Arrival>& operands, int64_t parts = 4) {
  const PlacementStrategy* const strategy = cheapest_strategy(kProduct, operands, parts);
  return to_string(strategy != nullptr ? *strategy : replicated_strategy(1, operands.size()));
}

TEST(MoveCost, IsWhatTheTableSays) {
  for (int64_t parts : {2, 3, 8}) {
    EXPECT_EQ(redistribute_cost(kRows, kRows, 100, parts), 0);
    EXPECT_EQ(redistribute_cost(kRows, kColumns, 100, parts), 100);
    EXPECT_EQ(redistribute_cost(kRows, kWhole, 100, parts), 100 * parts);
    EXPECT_EQ(redistribute_cost(kRows, kTerms, 100, parts), 100 * parts);
    EXPECT_EQ(redistribute_cost(kTerms, kTerms, 100, parts), 0);
    EXPECT_EQ(redistribute_cost(kTerms, kRows, 100, parts), 100 * parts);
    EXPECT_EQ(redistribute_cost(kTerms, kWhole, 100, parts), 200 * parts);
    EXPECT_EQ(redistribute_cost(kTerms, Partial{Partial::Op::kMax}, 100, parts), 200 * parts);
    for (const Placement& to : {kWhole, kRows, kTerms}) {
      EXPECT_EQ(redistribute_cost(kWhole, to, 100, parts), 0);
    }
  }
  for (const Placement& from : {kWhole, kRows, kColumns, kTerms}) {
    for (const Placement& to : {kWhole, kRows, kColumns, kTerms}) {
      EXPECT_EQ(redistribute_cost(from, to, 100, 1), 0);
    }
  }
}

TEST(RedistributeCost, WhatFitsMovesNothing) {
  EXPECT_EQ(chosen({{kRows, 9}, {kWhole, 1000}}), to_string(kProduct[0]));
  EXPECT_EQ(chosen({{kWhole, 1000}, {kColumns, 9}}), to_string(kProduct[1]));
  EXPECT_EQ(chosen({{kColumns, 9}, {kRows, 9}}), to_string(kProduct[2]));
  EXPECT_EQ(chosen({{kTerms, 9}, {kWhole, 9}}), to_string(kProduct[3]));
}

TEST(RedistributeCost, WhatCameWholeIsNotCut) {
  EXPECT_EQ(cheapest_strategy(kProduct, {{kWhole, 9}, {kWhole, 9}}, 4), nullptr);
  EXPECT_EQ(cheapest_strategy(kProduct, {}, 4), nullptr);
  // The reduced sum of terms of a nonlinear operator does not end up cut either.
  EXPECT_EQ(cheapest_strategy({{{kRows}, {kRows}}}, {{kTerms, 9}}, 4), nullptr);
}

TEST(RedistributeCost, TheSmallerOperandMoves) {
  EXPECT_EQ(chosen({{kRows, 1000}, {kColumns, 9}}), to_string(kProduct[0]));
  EXPECT_EQ(chosen({{kRows, 9}, {kColumns, 1000}}), to_string(kProduct[1]));
  EXPECT_EQ(chosen({{kTerms, 1000}, {kColumns, 9}}), to_string(kProduct[3]));
  EXPECT_EQ(chosen({{kTerms, 9}, {kColumns, 1000}}), to_string(kProduct[1]));
}

TEST(RedistributeCost, MovingBetweenCutsIsCheaperThanGathering) {
  EXPECT_EQ(chosen({{kColumns, 9}, {kColumns, 10}}), to_string(kProduct[2]));
}

TEST(RedistributeCost, OfEquallyCheapOnesTheFirst) {
  EXPECT_EQ(chosen({{kTerms, 9}, {kTerms, 9}}), to_string(kProduct[3]));
  EXPECT_EQ(chosen({{kRows, 9}, {kWhole, 9}}, 1), to_string(kProduct[0]));
}

// Against a search that takes the costs literally, for all arrivals of two operands.
TEST(RedistributeCost, IsTheCheapestForAllArrivals) {
  const std::vector<Placement> placements{kWhole, kRows, kColumns, kTerms};
  const auto total = [](const PlacementStrategy& strategy, const std::vector<Arrival>& operands) {
    int64_t sum = 0;
    for (size_t i = 0; i < operands.size(); ++i) {
      sum += redistribute_cost(operands[i].placement, strategy.operands[i], operands[i].bytes, 3);
    }
    return sum;
  };
  for (const Placement& a : placements) {
    for (const Placement& b : placements) {
      for (int64_t bytes : {1, 10, 100}) {
        const std::vector<Arrival> operands{{a, 10}, {b, bytes}};
        const PlacementStrategy* const strategy = cheapest_strategy(kProduct, operands, 3);
        const PlacementStrategy replicated = replicated_strategy(1, 2);
        const int64_t cost = total(strategy != nullptr ? *strategy : replicated, operands);
        EXPECT_LE(cost, total(replicated, operands));
        for (const PlacementStrategy& other : kProduct) {
          const bool keeps = (!a.is_replicate() && a == other.operands[0]) ||
                             (!b.is_replicate() && b == other.operands[1]);
          if (!keeps) continue;
          EXPECT_LE(cost, total(other, operands)) << a << b << bytes;
        }
      }
    }
  }
}

}  // namespace
}  // namespace fsdp::internal
