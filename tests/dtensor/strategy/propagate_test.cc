#include "dtensor/strategy/propagate.h"

#include "tests/dtensor/strategy/placements.h"

#include <gtest/gtest.h>

namespace fsdp::internal {
namespace {

std::vector<PlacementStrategy> product_strategy(const OpSchema&) {
  return {{{kRows}, {kRows, kWhole}},
          {{kColumns}, {kWhole, kColumns}},
          {{kTerms}, {kColumns, kRows}},
          {{kTerms}, {kTerms, kWhole}}};
}

OpSchema call_of(std::vector<int64_t> a, std::vector<int64_t> b) {
  return {.operands = {{.shape = std::move(a), .dtype = {.element_size = 4}},
                       {.shape = std::move(b), .dtype = {.element_size = 4}}},
          .plain = std::vector<PlainArgument>(2)};
}

TEST(Propagate, EachMeshDimensionGoesItsOwnWay) {
  const auto result = propagate(product_strategy, call_of({5, 7}, {7, 3}),
                                {{2, 3}, {{kRows, kColumns}, {kWhole, kRows}}}, 1);
  EXPECT_EQ(result, (Propagation{{{kRows, kColumns}, {kWhole, kRows}}, {{kRows, kTerms}}}));
}

TEST(Propagate, TwoMeshDimensionsMayCutOneTensorDimension) {
  const auto result = propagate(product_strategy, call_of({5, 7}, {7, 3}),
                                {{2, 2}, {{kColumns, kColumns}, {kRows, kRows}}}, 1);
  EXPECT_EQ(result, (Propagation{{{kColumns, kColumns}, {kRows, kRows}}, {{kTerms, kTerms}}}));
}

TEST(Propagate, WhatIsReplicatedStaysSo) {
  const auto result = propagate(product_strategy, call_of({5, 7}, {7, 3}),
                                {{2, 2}, {{kWhole, kWhole}, {kWhole, kWhole}}}, 2);
  EXPECT_EQ(result, (Propagation{{{kWhole, kWhole}, {kWhole, kWhole}},
                                 {{kWhole, kWhole}, {kWhole, kWhole}}}));
}

std::vector<PlacementStrategy> only_into_four(const OpSchema& call) {
  return call.parts == 4 ? product_strategy(call) : std::vector<PlacementStrategy>{};
}

TEST(Propagate, PartsAreThoseOfAllMeshDimensionsThatCut) {
  const auto kept = [](const Placement& second) {
    return propagate(only_into_four, call_of({5, 7}, {7, 3}),
                     {{2, 2}, {{kRows, second}, {kWhole, kWhole}}}, 1);
  };
  EXPECT_EQ(kept(kRows).results[0], (TensorPlacements{kRows, kRows}));
  EXPECT_EQ(kept(kWhole).results[0], (TensorPlacements{kWhole, kWhole}));
}

TEST(Propagate, BytesAreThoseOfTheWholeTensors) {
  const TensorPlacements rows{kRows};
  const TensorPlacements columns{kColumns};
  EXPECT_EQ(
      propagate(product_strategy, call_of({100, 7}, {7, 3}), {{2}, {rows, columns}}, 1).results[0],
      rows);
  EXPECT_EQ(
      propagate(product_strategy, call_of({3, 7}, {7, 100}), {{2}, {rows, columns}}, 1).results[0],
      columns);
}

}  // namespace
}  // namespace fsdp::internal
