#include "fully_shard/transport/reduction_plans.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace fsdp::testing {
namespace {

using internal::BackwardPlans;
using internal::common_order;
using internal::ReductionNumber;
using internal::UnitNumbers;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(CommonOrder, ContradictsNone) {
  EXPECT_THAT(*common_order({{3, 1}, {3, 2, 1}}), ElementsAre(3, 2, 1));
  EXPECT_THAT(*common_order({{3, 1}, {}, {2}}), ElementsAre(3, 1, 2));
  EXPECT_THAT(*common_order({{4, 2}, {4, 2}}), ElementsAre(4, 2));
  EXPECT_THAT(*common_order({{}, {}}), IsEmpty());
}

TEST(CommonOrder, IsNoneWhereOrdersContradictOneAnother) {
  EXPECT_FALSE(common_order({{1, 2}, {2, 1}}));
  EXPECT_FALSE(common_order({{1, 2}, {2, 3}, {3, 1}}));
}

UnitNumbers draw_order(std::mt19937& generator, uint32_t units) {
  UnitNumbers order(units);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), generator);
  order.resize(generator() % (units + 1));
  if (generator() % 2 == 0) std::sort(order.begin(), order.end());
  return order;
}

bool agrees(const UnitNumbers& all, const UnitNumbers& one) {
  size_t place = 0;
  for (const auto unit : all) {
    if (place < one.size() && one[place] == unit) ++place;
  }
  return place == one.size();
}

// Against all permutations.
TEST(CommonOrder, IsFoundWhereverThereIsOne) {
  std::mt19937 generator(1);
  size_t found = 0;
  for (int64_t trial = 0; trial < 3000; ++trial) {
    std::vector<UnitNumbers> orders;
    for (int64_t rank = 0; rank < 3; ++rank) orders.push_back(draw_order(generator, 4));
    UnitNumbers all = {0, 1, 2, 3};
    bool exists = false;
    do {
      exists = exists || std::all_of(orders.begin(), orders.end(),
                                     [&](const auto& one) { return agrees(all, one); });
    } while (std::next_permutation(all.begin(), all.end()));
    const auto order = common_order(orders);
    ASSERT_EQ(order.has_value(), exists);
    if (!order) continue;
    ++found;
    for (const auto& one : orders) ASSERT_TRUE(agrees(*order, one));
  }
  EXPECT_GT(found, 500);
  EXPECT_LT(found, 2900);
}

// Each rank sends its units one after the other, and waits before each for all rows of
// the one before. True: all come to their end, in whatever order they run.
bool all_end(const std::vector<UnitNumbers>& plans) {
  std::vector<size_t> sent(plans.size(), 0);  // of each rank's units
  const auto is_complete = [&](uint32_t unit) {
    for (size_t rank = 0; rank < plans.size(); ++rank) {
      const auto place = std::find(plans[rank].begin(), plans[rank].end(), unit);
      const auto index = static_cast<size_t>(place - plans[rank].begin());
      if (place != plans[rank].end() && index >= sent[rank]) return false;
    }
    return true;
  };
  for (bool moves = true; moves;) {
    moves = false;
    for (size_t rank = 0; rank < plans.size(); ++rank) {
      const bool may = sent[rank] < plans[rank].size() &&
                       (sent[rank] == 0 || is_complete(plans[rank][sent[rank] - 1]));
      sent[rank] += may ? 1 : 0;
      moves = moves || may;
    }
  }
  for (size_t rank = 0; rank < plans.size(); ++rank) {
    if (sent[rank] < plans[rank].size()) return false;
  }
  return true;
}

TEST(BackwardPlans, WhereTheyHaveOneOrderRanksThatWaitDoNotWaitForOneAnother) {
  std::mt19937 generator(2);
  size_t waits = 0, stuck = 0;
  for (int64_t trial = 0; trial < 5000; ++trial) {
    const int64_t ranks = 2 + static_cast<int64_t>(generator() % 3);
    BackwardPlans plans(ranks);
    std::vector<UnitNumbers> orders;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      orders.push_back(draw_order(generator, 5));
      plans.add(rank, {.root = 0, .units = orders.back()});
    }
    if (!plans.have_one_order()) {
      stuck += all_end(orders) ? 0 : 1;
      continue;
    }
    ++waits;
    ASSERT_TRUE(all_end(orders));
  }
  EXPECT_GT(waits, 500);
  EXPECT_GT(stuck, 500) << "or orders that contradict one another do no harm";
}

TEST(BackwardPlans, OfSeveralRoots) {
  using Sends = BackwardPlans::Sends;
  BackwardPlans plans(2);
  plans.add(0, {.root = 7, .units = {7, 8}});
  EXPECT_TRUE(plans.have_one_order());
  EXPECT_EQ(plans.sends(1, 7, 8), Sends::kUnknown);
  plans.add(1, {.root = 7, .units = {8}});
  EXPECT_TRUE(plans.have_one_order());
  EXPECT_EQ(plans.sends(0, 7, 8), Sends::kYes);
  EXPECT_EQ(plans.sends(1, 7, 7), Sends::kNo);
  plans.add(0, {.root = 3, .units = {3}});
  EXPECT_EQ(plans.sends(1, 3, 3), Sends::kUnknown);
  EXPECT_TRUE(plans.have_one_order());
  plans.add(1, {.root = 5, .units = {5, 3}});
  EXPECT_FALSE(plans.have_one_order()) << "ranks that come to other roots";
  EXPECT_THAT(plans.order(), ElementsAre(7, 8, 5, 3));
}

TEST(BackwardPlans, ThatContradictOneAnotherAreOrderedByNumber) {
  BackwardPlans plans(2);
  plans.add(0, {.root = 1, .units = {4, 2}});
  plans.add(1, {.root = 1, .units = {2, 4, 3}});
  EXPECT_FALSE(plans.have_one_order());
  EXPECT_THAT(plans.order(), ElementsAre(2, 3, 4));
}

TEST(ReductionNumbers, AreWhatTheyWereMadeOf) {
  using Kind = ReductionNumber::Kind;
  std::mt19937 generator(3);
  for (int64_t trial = 0; trial < 1000; ++trial) {
    const auto draw = [&generator](uint32_t count) {
      return static_cast<uint32_t>(generator() % count);
    };
    const ReductionNumber number = {.step = draw(ReductionNumber::kSteps),
                                    .backward = draw(ReductionNumber::kBackwards),
                                    .kind = static_cast<Kind>(draw(4)),
                                    .unit = draw(ReductionNumber::kUnits),
                                    .round = draw(ReductionNumber::kRounds),
                                    .part = draw(ReductionNumber::kParts)};
    const auto word = number.in_channel();
    ASSERT_EQ(ReductionNumber::of(word), number);
    ASSERT_TRUE(ReductionNumber::all_of(number.step).contains(word));
    ASSERT_EQ(ReductionNumber::rows_of(number.step).contains(word), number.kind == Kind::kRows);
    ASSERT_EQ(ReductionNumber::words_of(number.step).contains(word), number.kind != Kind::kRows);
    const auto other = (number.step + 1 + draw(5)) % ReductionNumber::kSteps;
    ASSERT_FALSE(ReductionNumber::all_of(other).contains(word));
    for (const auto step : {number.step, other, number.step + 1})
      ASSERT_EQ(ReductionNumber::all_before(step).contains(word), step > number.step);
    ASSERT_EQ(word >> 61, 1) << "apart from other messages";
  }
}

}  // namespace
}  // namespace fsdp::testing
