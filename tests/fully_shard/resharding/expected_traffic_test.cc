// The table of what is sent, by hand: a root and four blocks of one parameter of 12 x 12
// doubles each.
#include "tests/fully_shard/resharding/expected_traffic.h"

#include <gtest/gtest.h>

#include <vector>

namespace fsdp::testing {
namespace {

const UnitSize kTwelveByTwelve{{.rows = 12, .columns = 12}};
const ChainSize kFiveUnits{kTwelveByTwelve, {4, kTwelveByTwelve}};

constexpr ChainPolicy kOneRank{};
constexpr ChainPolicy kTwo{.shards = 2};
constexpr ChainPolicy kTwoKeep{.shards = 2, .keeps = Keeps::kAll};
constexpr ChainPolicy kFour{.shards = 4};
constexpr ChainPolicy kFourKeepHalves{.shards = 4, .keeps = Keeps::kPart, .neighbours = 2};
constexpr ChainPolicy kTwoByTwo{.shards = 2, .replicas = 2};

ChainPolicy with(ChainPolicy policy, Accumulation accumulation) {
  policy.accumulation = accumulation;
  return policy;
}

// Half a parameter is 576 bytes, a quarter 288, padded to 320; a reduction has 64 more.
TEST(ExpectedTraffic, IsWhatAPersonCounts) {
  const struct {
    ChainPolicy policy;
    StepTraffic traffic;
  } table[] = {
      // gathers, of these ahead, bytes; reduce-scatters, bytes; all-reduces
      {kOneRank, {0, 0, 0, 0, 0, 0}},
      {kTwo, {5 + 3, 4 + 3, 8 * 576, 5, 5 * 640, 0}},
      {kTwoKeep, {5, 4, 5 * 576, 5, 5 * 640, 0}},
      {kFour, {5 + 3, 4 + 3, 8 * 3 * 320, 5, 5 * 3 * 384, 0}},
      {kFourKeepHalves, {5 + 3, 4 + 3, 5 * 3 * 320 + 3 * 576, 5, 5 * 3 * 384, 0}},
      {kTwoByTwo, {5 + 3, 4 + 3, 8 * 576, 5, 5 * 640, 5}},
      {with(kOneRank, Accumulation::kNoSync), {0, 0, 0, 0, 0, 0}},
      {with(kTwo, Accumulation::kNoSync), {2 * 8, 2 * 7, 16 * 576, 5, 5 * 640, 0}},
      {with(kTwo, Accumulation::kShardsOnly), {2 * 8, 2 * 7, 16 * 576, 10, 10 * 640, 0}},
      {with(kTwoByTwo, Accumulation::kNoSync), {2 * 8, 2 * 7, 16 * 576, 5, 5 * 640, 5}},
      {with(kTwoByTwo, Accumulation::kShardsOnly), {2 * 8, 2 * 7, 16 * 576, 10, 10 * 640, 5}},
  };
  for (const auto& row : table) EXPECT_EQ(expected_traffic(kFiveUnits, row.policy), row.traffic);
}

TEST(ExpectedTraffic, HoldsWhatAPersonAddsUp) {
  // Of two ranks: the root and its gradients, two units, gradients twice, a row.
  constexpr int64_t kUnit = 1152, kRows = 2 * 640, kOfTwo = 3 * kUnit + 3 * kRows + 640;
  constexpr int64_t kOfFour = 3 * 4 * 320 + 3 * 4 * 384 + 384;
  const struct {
    ChainPolicy policy;
    int64_t bytes;
  } table[] = {
      {kOneRank, 0},
      {with(kOneRank, Accumulation::kNoSync), 5 * kUnit},
      {kTwo, kOfTwo},
      {kTwoKeep, kOfTwo + 4 * kUnit},
      {with(kTwo, Accumulation::kNoSync), kOfTwo + 5 * kUnit},
      {with(kTwo, Accumulation::kShardsOnly), kOfTwo},
      {kFour, kOfFour},
      {kFourKeepHalves, kOfFour + 4 * 576},
      {kTwoByTwo, kOfTwo + 2 * 640},
      {with(kTwoByTwo, Accumulation::kShardsOnly), kOfTwo + 2 * 640 + 5 * 576},
  };
  for (const auto& row : table) EXPECT_EQ(expected_peak_bytes(kFiveUnits, row.policy), row.bytes);
}

TEST(ExpectedTraffic, LeavesOutFrozenParametersWhereGradientsGoAndUnusedOnesWhereTheyWait) {
  auto frozen = kFiveUnits, unused = kFiveUnits;
  frozen.blocks[0].push_back({.rows = 12, .columns = 12, .is_trainable = false});
  unused.blocks[0].push_back({.rows = 12, .columns = 12, .is_used = false});
  EXPECT_EQ(expected_traffic(frozen, kTwo).reduce_scatter_bytes, 5 * 640);
  EXPECT_EQ(expected_traffic(unused, kTwo).reduce_scatter_bytes, 6 * 576 + 5 * 64);
  for (const auto& chain : {frozen, unused}) {
    EXPECT_EQ(expected_traffic(chain, kTwo).all_gather_bytes, (8 + 2) * 576);
    EXPECT_EQ(expected_kept_bytes(chain, with(kTwo, Accumulation::kNoSync)), 5 * 1152);
  }
}

// So an option without effect sends something else than is expected of it.
TEST(ExpectedTraffic, IsAnotherForEveryOption) {
  std::vector<StepTraffic> seen;
  for (const auto keeps : {Keeps::kNothing, Keeps::kAll, Keeps::kPart}) {
    for (const auto accumulation : kAllAccumulations) {
      const auto traffic = expected_traffic(kFiveUnits, {.shards = 4,
                                                         .replicas = 2,
                                                         .keeps = keeps,
                                                         .neighbours = 2,
                                                         .accumulation = accumulation});
      for (const auto& other : seen) EXPECT_FALSE(traffic == other) << traffic;
      seen.push_back(traffic);
    }
  }
}

}  // namespace
}  // namespace fsdp::testing
