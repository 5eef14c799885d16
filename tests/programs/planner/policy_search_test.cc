#include "programs/planner/policy_search.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace programs {
namespace {

using ::testing::HasSubstr;

constexpr MachineRates kRates = {
    .flops_per_second = 100, .node_bytes_per_second = 10, .network_bytes_per_second = 1};

PlannedPolicy planned(int64_t tp, double peak, LinkBytes received, double flops, double tokens) {
  return {.policy = {.tp = tp},
          .peak_bytes = peak,
          .received = received,
          .flops = flops,
          .tokens = tokens};
}

TEST(StepEstimate, IsTheSlowerOfBothWhereAllOverlapsAndTheirSumWhereNothingDoes) {
  LinkBytes bytes;
  bytes.add(Link::kWithinNode, 20);
  bytes.add(Link::kBetweenNodes, 3);
  bytes.add(Link::kBetweenNodes, 2);
  const auto estimate = estimate_step(400, bytes, kRates);
  EXPECT_EQ(estimate.compute_seconds, 4);
  EXPECT_EQ(estimate.communication_seconds, 7);
  EXPECT_EQ(estimate.least_seconds(), 7);
  EXPECT_EQ(estimate.most_seconds(), 11);
  EXPECT_EQ(estimate_step(800, bytes, kRates).least_seconds(), 8);
}

TEST(PolicySearch, PlansOnlyMeshesThatTheRanksFill) {
  for (const int64_t ranks : {1, 2, 6, 8, 16, 24, 64, 512, 16384}) {
    const auto policies = policies_to_plan({.ranks = ranks, .ranks_per_node = 8, .kv_heads = 4});
    ASSERT_FALSE(policies.empty());
    for (const auto& policy : policies) {
      SCOPED_TRACE(to_string(policy) + " on " + std::to_string(ranks));
      EXPECT_EQ(ranks % (policy.replicas * policy.tp), 0);
      EXPECT_LE(policy.tp, 4);
      const int64_t copy = ranks / policy.replicas / policy.tp;
      const int64_t in_node = 8 / policy.tp;
      const bool to_node = policy.reshard == Reshard::kToNode;
      EXPECT_TRUE(!to_node || (copy > in_node && copy % in_node == 0));
      EXPECT_EQ(std::count(policies.begin(), policies.end(), policy), 1);
    }
  }
}

TEST(PolicySearch, TriesShardsWithinANodeAndOverAll) {
  const auto policies = policies_to_plan({.ranks = 64, .ranks_per_node = 8, .kv_heads = 8});
  const auto has = [&](ShardingPolicy policy) {
    return std::count(policies.begin(), policies.end(), policy) == 1;
  };
  EXPECT_TRUE(has({.replicas = 1}));
  EXPECT_TRUE(has({.replicas = 8}));
  EXPECT_TRUE(has({.replicas = 1, .tp = 8}));
  EXPECT_TRUE(has({.reshard = Reshard::kKeep}));
  EXPECT_TRUE(has({.reshard = Reshard::kToNode, .activations = Activations::kRecomputed}));
  EXPECT_FALSE(has({.replicas = 8, .reshard = Reshard::kToNode}));  // shards are in the node
}

TEST(PolicySearch, PutsWhatRecomputesBehindWhatDoesNot) {
  const auto policies = policies_to_plan({.ranks = 64, .ranks_per_node = 8, .kv_heads = 8});
  ASSERT_EQ(policies.size() % 2, 0u);
  for (size_t i = 0; i < policies.size(); i += 2) {
    auto expected = policies[i];
    EXPECT_EQ(expected.activations, Activations::kKept);
    expected.activations = Activations::kRecomputed;
    EXPECT_EQ(policies[i + 1], expected);
  }
}

TEST(PolicySearch, ChoosesWhatFitsByTheTimeOfItsBytesForAToken) {
  const auto by_network = planned(1, 50, {.within_node = 0, .between_nodes = 10}, 1, 10);
  const auto by_node = planned(2, 60, {.within_node = 50, .between_nodes = 0}, 1, 10);
  const auto of_fewer_tokens = planned(4, 10, {.within_node = 50, .between_nodes = 0}, 1, 2);
  const auto too_large = planned(8, 101, {}, 1, 10);
  const auto fit = fitting({by_network, of_fewer_tokens, too_large, by_node}, 100, kRates);
  ASSERT_EQ(fit.size(), 3u);
  EXPECT_EQ(fit[0].policy.tp, 2);
  EXPECT_EQ(fit[1].policy.tp, 1);
  EXPECT_EQ(fit[2].policy.tp, 4);
}

TEST(PolicySearch, TakesWhatComputesLessOfTwoThatReceiveAlike) {
  const auto recomputes = planned(1, 1, {.within_node = 5}, 4, 10);
  const auto keeps = planned(2, 2, {.within_node = 5}, 3, 10);
  EXPECT_EQ(fitting({recomputes, keeps}, 2, kRates).front().policy.tp, 2);
  EXPECT_EQ(smallest({recomputes, keeps})->policy.tp, 1);
  EXPECT_FALSE(smallest({}));
}

TEST(PolicySearch, SaysWhatAPolicyIs) {
  EXPECT_EQ(to_string(ShardingPolicy{.replicas = 4,
                                     .tp = 8,
                                     .reshard = Reshard::kToNode,
                                     .activations = Activations::kRecomputed}),
            "replicas 4, tp 8, reshard to the node, activations recomputed");
  EXPECT_THAT(to_string(ShardingPolicy{}), HasSubstr("reshard after forward"));
  EXPECT_THAT(to_string(ShardingPolicy{.reshard = Reshard::kKeep}),
              HasSubstr("keep until backward"));
}

}  // namespace
}  // namespace programs
