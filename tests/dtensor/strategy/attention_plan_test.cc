// Which blocks of an attention ranks compute whose sequence is cut, against every pair of
// a query and a key; and how attention is divided.
#include "dtensor/strategy/attention_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

using enum SequenceAttention;
using Pair = std::pair<int64_t, int64_t>;  // a query and a key that it sees

std::vector<Pair> pairs_of(const AttentionBlock& block) {
  std::vector<Pair> pairs;
  for (int64_t q = block.query_begin; q < block.query_end; ++q)
    for (int64_t k = block.key_begin; k < block.key_end; ++k)
      if (!block.is_triangle || k - block.key_begin <= q - block.query_begin)
        pairs.emplace_back(q, k);
  return pairs;
}

TEST(AttentionBlocks, HaveEachPairOnce) {
  constexpr int64_t kMost = 6;
  for (int64_t q0 = 0; q0 <= kMost; ++q0)
    for (int64_t q1 = q0; q1 <= kMost; ++q1)
      for (int64_t k0 = 0; k0 <= kMost; ++k0)
        for (int64_t k1 = k0; k1 <= kMost; ++k1)
          for (const bool is_causal : {false, true}) {
            std::vector<Pair> found, expected;
            for (const auto& block : blocks_of({q0, q1}, {k0, k1}, is_causal))
              for (const auto& pair : pairs_of(block)) found.push_back(pair);
            for (int64_t q = q0; q < q1; ++q)
              for (int64_t k = k0; k < k1; ++k)
                if (!is_causal || k <= q) expected.emplace_back(q, k);
            std::sort(found.begin(), found.end());
            EXPECT_EQ(found, expected) << q0 << " " << q1 << " " << k0 << " " << k1;
          }
}

TensorLayout layout_of(int64_t ranks, const Placement& placement, std::vector<int64_t> shape) {
  const auto stride = contiguous_strides(shape);
  return TensorLayout({.mesh_shape = {ranks},
                       .placements = {placement},
                       .shape = std::move(shape),
                       .stride = stride});
}

TEST(RunsOfPart, AreWhatARankHasOfTheSequence) {
  const auto blocks = layout_of(2, Shard{.dim = 2, .outer = 3}, {1, 1, 12, 8});
  EXPECT_EQ(runs_of_part(blocks, 2, {1}),
            (std::vector<Positions>{{2, 4, 0}, {6, 8, 2}, {10, 12, 4}}));
  const auto uneven = layout_of(4, Shard{2}, {1, 1, 5, 8});
  EXPECT_EQ(runs_of_part(uneven, 2, {2}), (std::vector<Positions>{{4, 5, 0}}));
  EXPECT_TRUE(runs_of_part(uneven, 2, {3}).empty());
  const auto heads = layout_of(2, Shard{1}, {1, 4, 5, 8});
  EXPECT_EQ(runs_of_part(heads, 2, {1}), (std::vector<Positions>{{0, 5, 0}}));
}

struct Case {
  int64_t heads = 8, groups = 8, ranks = 2, rows = 64;
  Placement cut = Shard{2};
  bool is_causal = true, has_mask = false;
};

AttentionLayouts layouts_of(const Case& of) {
  const auto query = layout_of(of.ranks, of.cut, {1, of.heads, of.rows, 16});
  const auto key = layout_of(of.ranks, of.cut, {1, of.groups, of.rows, 16});
  return {
      .query = query, .key = key, .value = key, .is_causal = of.is_causal, .has_mask = of.has_mask};
}

SequenceAttention plan_of(const Case& of, SequenceAttention wanted = kCheapest) {
  return attention_plan(layouts_of(of), 0, wanted);
}

TEST(AttentionPlan, TakesWhatItsBusiestRankComputesLeastOf) {
  EXPECT_EQ(plan_of({}), kHeads) << "rows of a triangle are uneven";
  EXPECT_EQ(plan_of({.heads = 3, .groups = 3}), kHeads) << "2 of 3, where rows are 3 of 4";
  EXPECT_EQ(plan_of({.heads = 3, .groups = 3, .is_causal = false}), kGathered);
  EXPECT_EQ(plan_of({.heads = 1, .groups = 1}), kGathered);
  EXPECT_EQ(plan_of({.heads = 3, .groups = 3, .cut = Shard{.dim = 2, .outer = 8}}), kGathered);
}

TEST(AttentionPlan, OfEqualOnesTakesWhatSendsLess) {
  EXPECT_EQ(plan_of({.ranks = 4, .is_causal = false}), kHeads);
  EXPECT_EQ(plan_of({.groups = 1, .ranks = 4, .is_causal = false}), kGathered);
}

TEST(AttentionPlan, SendsManyKeysAroundInARing) {
  EXPECT_EQ(plan_of({.heads = 1, .groups = 1, .ranks = 2}), kGathered);
  EXPECT_EQ(plan_of({.heads = 1, .groups = 1, .ranks = 4}), kRing);
  EXPECT_EQ(plan_of({.heads = 1, .groups = 1, .ranks = 4, .has_mask = true}), kGathered);
}

TEST(AttentionPlan, DoesWhatIsWantedWhereItCan) {
  EXPECT_EQ(plan_of({}, kRing), kRing);
  EXPECT_EQ(plan_of({}, kGathered), kGathered);
  EXPECT_EQ(plan_of({.heads = 1, .groups = 1}, kHeads), kHeads);
  EXPECT_EQ(plan_of({.has_mask = true}, kRing), kGathered);
  EXPECT_EQ(plan_of({.cut = Shard{.dim = 2, .outer = 4}}, kRing), kRing);
}

TEST(AttentionPlan, HeadsGoTogetherWithTheirKeys) {
  EXPECT_TRUE(heads_can_be_cut(layouts_of({.heads = 3, .groups = 3}), 0));
  EXPECT_TRUE(heads_can_be_cut(layouts_of({.groups = 2}), 0));
  EXPECT_FALSE(heads_can_be_cut(layouts_of({.groups = 2, .ranks = 4}), 0));
  // Cut over another mesh dimension already.
  const auto placed = [](int64_t heads) {
    return TensorLayout({.mesh_shape = {2, 2},
                         .placements = {Shard{2}, Shard{1}},
                         .shape = {1, heads, 6, 4},
                         .stride = contiguous_strides({1, heads, 6, 4})});
  };
  const auto with = [&](int64_t heads, int64_t groups) {
    return AttentionLayouts{.query = placed(heads), .key = placed(groups), .value = placed(groups)};
  };
  EXPECT_TRUE(heads_can_be_cut(with(8, 4), 0));
  EXPECT_FALSE(heads_can_be_cut(with(8, 2), 0));
}

}  // namespace
}  // namespace fsdp::internal
