#include "optim/internal/owners.h"

#include "optim/internal/matrices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

namespace fsdp::internal {
namespace {

using ::testing::ElementsAre;

// The least that the rank with the most can have, by trying everything.
double best(const std::vector<double>& costs, std::vector<double> loads, size_t next = 0) {
  if (next == costs.size()) return *std::max_element(loads.begin(), loads.end());
  double least = std::accumulate(costs.begin(), costs.end(), 0.0);
  for (double& load : loads) {
    load += costs[next];
    least = std::min(least, best(costs, loads, next + 1));
    load -= costs[next];
  }
  return least;
}

TEST(Owners, TheLongestComeFirstAndTiesGoByPosition) {
  Owners owners(2);
  EXPECT_THAT(owners.assign({1, 5, 4, 1}), ElementsAre(1, 0, 1, 0));
  EXPECT_THAT(owners.loads(), ElementsAre(6, 5));
  EXPECT_THAT(owners.assign({2, 2, 2}), ElementsAre(1, 0, 1));  // what came before counts
}

TEST(Owners, AreWithinTheBoundOfTheBest) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    const auto ranks = static_cast<int64_t>(1 + random() % 4);
    std::vector<double> costs(1 + random() % 7);
    for (double& cost : costs) cost = static_cast<double>(random() % 9);
    Owners owners(ranks);
    std::vector<double> loads(static_cast<size_t>(ranks), 0);
    const auto assigned = owners.assign(costs);
    for (size_t i = 0; i < costs.size(); ++i) loads[static_cast<size_t>(assigned[i])] += costs[i];
    EXPECT_EQ(loads, owners.loads());
    const double bound = (4.0 / 3 - 1.0 / (3 * static_cast<double>(ranks))) *
                         best(costs, std::vector<double>(static_cast<size_t>(ranks), 0));
    EXPECT_LE(*std::max_element(loads.begin(), loads.end()), bound + 1e-9);
  }
}

TEST(NewtonSchulzCost, IsThatOfItsProducts) {
  EXPECT_EQ(newton_schulz_cost({1, 3, 5}), 9 * (2 * 5 + 3));
  EXPECT_EQ(newton_schulz_cost({1, 5, 3}), 9 * (2 * 5 + 3));
  EXPECT_EQ(newton_schulz_cost({4, 2, 2}), 4 * 4 * 6);
}

}  // namespace
}  // namespace fsdp::internal
