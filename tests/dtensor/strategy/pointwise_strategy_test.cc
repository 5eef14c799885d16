#include "dtensor/strategy/pointwise_strategy.h"

#include "dtensor/ops/op_table.h"
#include "dtensor/strategy/propagate.h"
#include "tests/dtensor/strategy/placements.h"

#include <gtest/gtest.h>

#include <set>

namespace fsdp::internal {
namespace {

OpSchema elementwise(const std::vector<std::vector<int64_t>>& shapes) {
  OpSchema call;
  for (const auto& shape : shapes) {
    call.operands.push_back(
        {.shape = shape, .stride = contiguous(shape).stride, .dtype = {.element_size = 4}});
  }
  return call;
}

std::set<std::string> texts(const std::vector<PlacementStrategy>& strategies) {
  std::set<std::string> texts;
  for (const PlacementStrategy& strategy : strategies) texts.insert(to_string(strategy));
  return texts;
}

TEST(PointwiseStrategy, OperandsAreCutAlongWhatTheyAreNotRepeatedAlong) {
  const auto call = elementwise({{5, 7}, {7}, {5, 1}, {}});
  EXPECT_EQ(texts(pointwise_strategy(call, Linearity::kNone)),
            texts({{{kRows}, {kRows, kWhole, kRows, kWhole}},
                   {{kColumns}, {kColumns, kRows, kWhole, kWhole}}}));
}

// As some would of parts: of these rows, the last rank's would be one each.
TEST(PointwiseStrategy, ShapesThatDoNotFitHaveNone) {
  EXPECT_EQ(texts(pointwise_strategy(elementwise({{5, 7}, {3, 7}}), Linearity::kSum)), texts({}));
  EXPECT_EQ(texts(pointwise_strategy(elementwise({{3, 7}, {5, 7}}), Linearity::kSum)), texts({}));
}

// As it is on devices other than CPUs.
TEST(PointwiseStrategy, AnEmptyBufferOfLogSigmoidStaysWhole) {
  const auto& backward = *op_table().find("log_sigmoid_backward.");
  const auto strategies = backward.strategy.strategies(elementwise({{5, 7}, {5, 7}, {0}}));
  EXPECT_TRUE(texts(strategies).contains(to_string({{kRows}, {kRows, kRows, kWhole}})));
  EXPECT_TRUE(texts(strategies).contains(to_string({{kTerms}, {kTerms, kWhole, kWhole}})));
}

TEST(PointwiseStrategy, TermsAreThoseThatTheOperatorIsLinearIn) {
  const auto call = elementwise({{}, {}});
  const Placement average = Partial{Partial::Op::kAvg};
  EXPECT_EQ(texts(pointwise_strategy(call, Linearity::kNone)), texts({}));
  EXPECT_EQ(texts(pointwise_strategy(call, Linearity::kSum)),
            texts({{{kTerms}, {kTerms, kTerms}}, {{average}, {average, average}}}));
  EXPECT_EQ(texts(pointwise_strategy(call, Linearity::kScale)),
            texts({{{kTerms}, {kTerms, kWhole}}, {{average}, {average, kWhole}}}));
  EXPECT_EQ(texts(pointwise_strategy(call, Linearity::kProduct)),
            texts({{{kTerms}, {kTerms, kWhole}},
                   {{kTerms}, {kWhole, kTerms}},
                   {{average}, {average, kWhole}},
                   {{average}, {kWhole, average}}}));
  EXPECT_EQ(pointwise_strategy(call, Linearity::kAny).size(), 5U);
  EXPECT_EQ(pointwise_strategy(call, Linearity::kIdempotent).size(), 3U);
}

// On one mesh dimension of two ranks: where two operands of one shape go, and the result.
std::string goes(Linearity linearity, const Placement& a, const Placement& b,
                 std::optional<size_t> written = {}) {
  const auto result =
      propagate([&](const OpSchema& call) { return pointwise_strategy(call, linearity); },
                elementwise({{5, 7}, {5, 7}}), {{2}, {{a}, {b}}, written}, 1);
  return to_string(
      PlacementStrategy{result.results[0], {result.operands[0][0], result.operands[1][0]}});
}

TEST(PointwiseStrategy, WhatIsWholeBecomesTermsBesideTerms) {
  EXPECT_EQ(goes(Linearity::kSum, kTerms, kWhole), to_string({{kTerms}, {kTerms, kTerms}}));
  EXPECT_EQ(goes(Linearity::kProduct, kWhole, kTerms), to_string({{kTerms}, {kWhole, kTerms}}));
}

TEST(PointwiseStrategy, TermsAreReducedToWhereTheOthersAre) {
  for (const auto linearity : {Linearity::kNone, Linearity::kSum, Linearity::kProduct}) {
    EXPECT_EQ(goes(linearity, kTerms, kColumns), to_string({{kColumns}, {kColumns, kColumns}}));
  }
  EXPECT_EQ(goes(Linearity::kNone, kTerms, kWhole), to_string({{kWhole}, {kWhole, kWhole}}));
}

TEST(PointwiseStrategy, WhatIsWrittenStays) {
  for (const Placement& own : {kWhole, kRows, kColumns}) {
    for (const Placement& other : {kWhole, kRows, kColumns, kTerms}) {
      for (const auto linearity : {Linearity::kNone, Linearity::kSum, Linearity::kProduct}) {
        EXPECT_EQ(goes(linearity, own, other, 0), to_string({{own}, {own, own}}));
        EXPECT_EQ(goes(linearity, other, own, 1), to_string({{own}, {own, own}}));
      }
    }
  }
  for (const Placement& other : {kWhole, kRows, kTerms}) {
    EXPECT_EQ(goes(Linearity::kSum, kTerms, other, 0), to_string({{kTerms}, {kTerms, kTerms}}));
    EXPECT_EQ(goes(Linearity::kScale, kTerms, other, 0), to_string({{kTerms}, {kTerms, kWhole}}));
    EXPECT_EQ(goes(Linearity::kNone, kTerms, other, 0), to_string({{kWhole}, {kWhole, kWhole}}));
  }
}

TEST(PointwiseStrategy, ResultsLieInMemoryLikeTheFirstThatIsNotRepeated) {
  auto call = elementwise({{7}, {5, 7}, {5, 7}});
  EXPECT_EQ(pointwise_result(call), contiguous({5, 7}));
  call.operands[1].stride = {1, 5};
  EXPECT_EQ(pointwise_result(call), transposed({5, 7}, 0, 1));
  EXPECT_EQ(pointwise_result(elementwise({{5, 1}, {7}})), contiguous({5, 7}));
  EXPECT_EQ(pointwise_result(elementwise({{0, 1}, {7}})), contiguous({0, 7}));
}

}  // namespace
}  // namespace fsdp::internal
