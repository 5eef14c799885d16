#include "fully_shard/units/planned_owners.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace fsdp::internal {
namespace {

using Bytes = std::vector<int64_t>;

TEST(PlannedOwners, TakeTheLargestFirstAndTheLeastLoadedCoordinate) {
  BytesByCoordinate bytes{.in_unit = {0, 0, 0}, .in_owned = {0, 0, 0}};
  EXPECT_EQ(planned_owners({5, 9, 5, 4, 4}, bytes), (Bytes{1, 0, 2, 1, 2}));
  EXPECT_EQ(bytes.in_unit, (Bytes{9, 9, 9}));
}

TEST(PlannedOwners, StartFromWhatTheUnitsOtherParametersGive) {
  BytesByCoordinate bytes{.in_unit = {6, 6, 1}, .in_owned = {0, 0, 0}};
  EXPECT_EQ(planned_owners({4, 3}, bytes), (Bytes{2, 2}));
}

// One per unit: they go round.
TEST(PlannedOwners, OfSeveralUnitsAreEvenTogether) {
  Bytes owned(3, 0), owners;
  for (int unit = 0; unit < 6; ++unit) {
    BytesByCoordinate bytes{.in_unit = {0, 0, 0}, .in_owned = owned};
    owners.push_back(planned_owners({8}, bytes)[0]);
    owned = bytes.in_owned;
  }
  EXPECT_EQ(owners, (Bytes{0, 1, 2, 0, 1, 2}));
}

// Graham's bound: at most 4/3 of the best, which is at least the mean and the largest.
TEST(PlannedOwners, AreWithinTheBoundOfTheirRule) {
  for (int64_t ranks = 1; ranks <= 5; ++ranks) {
    for (uint64_t seed = 1; seed <= 200; ++seed) {
      Bytes sizes;
      uint64_t state = seed;
      for (int i = 0; i < 12; ++i) {
        state = state * 6364136223846793005ULL + 1442695040888963407ULL;
        sizes.push_back(static_cast<int64_t>(state >> 58) + 1);
      }
      BytesByCoordinate bytes{.in_unit = Bytes(static_cast<size_t>(ranks), 0),
                              .in_owned = Bytes(static_cast<size_t>(ranks), 0)};
      const auto owners = planned_owners(sizes, bytes);
      Bytes loads(static_cast<size_t>(ranks), 0);
      for (size_t i = 0; i < sizes.size(); ++i) loads[static_cast<size_t>(owners[i])] += sizes[i];
      EXPECT_EQ(loads, bytes.in_unit);
      const auto sum = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
      const auto least =
          std::max({(sum + ranks - 1) / ranks, *std::max_element(sizes.begin(), sizes.end())});
      EXPECT_LE(3 * *std::max_element(loads.begin(), loads.end()), 4 * least + 3);
    }
  }
}

}  // namespace
}  // namespace fsdp::internal
