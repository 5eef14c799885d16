#include "dtensor/strategy/redistribute_plan.h"

#include <gtest/gtest.h>

#include <vector>

namespace fsdp::internal {
namespace {

using Placements = std::vector<Placement>;
using Plan = std::vector<RedistributeMove>;

// Every list of `count` placements of a tensor of two dimensions.
std::vector<Placements> all_lists(size_t count) {
  const Placements each = {Replicate{}, Shard{0}, Shard{1}, Partial{}, Partial{Partial::Op::kMax}};
  std::vector<Placements> lists = {{}};
  for (size_t i = 0; i < count; ++i) {
    std::vector<Placements> longer;
    for (const auto& list : lists) {
      for (const auto& placement : each) {
        longer.push_back(list);
        longer.back().push_back(placement);
      }
    }
    lists = std::move(longer);
  }
  return lists;
}

bool cuts_inside(const Placements& placements, size_t mesh_dim, const Placement& changed) {
  if (!changed.is_shard()) return false;
  for (size_t inner = mesh_dim + 1; inner < placements.size(); ++inner)
    if (placements[inner].is_shard(changed.shard_dim())) return true;
  return false;
}

// No cut lies inside one that changes, and none is split into terms of another kind while
// terms are there that are to go.
void expect_allowed(const RedistributeMove& move, const Placements& now, const Placements& to) {
  EXPECT_EQ(now[move.mesh_dim], move.from);
  EXPECT_NE(move.from, move.to);
  EXPECT_FALSE(cuts_inside(now, move.mesh_dim, move.from));
  EXPECT_FALSE(cuts_inside(now, move.mesh_dim, move.to));
  if (!move.to.is_partial()) return;
  for (size_t m = 0; m < now.size(); ++m) {
    if (m == move.mesh_dim) continue;
    EXPECT_TRUE(!now[m].is_partial() || now[m] == to[m]);
  }
}

TEST(RedistributePlan, ArrivesByAllowedMovesFromEveryListToEveryOther) {
  for (const size_t count : {1, 2, 3}) {
    for (const auto& from : all_lists(count)) {
      for (const auto& to : all_lists(count)) {
        Placements now = from;
        for (const auto& move : redistribute_plan(from, to)) {
          expect_allowed(move, now, to);
          now[move.mesh_dim] = move.to;
        }
        EXPECT_EQ(now, to);
      }
    }
  }
}

TEST(RedistributePlan, MovesEachMeshDimensionOnceWhereNothingIsInTheWay) {
  EXPECT_EQ(redistribute_plan({Shard{0}, Partial{}}, {Replicate{}, Shard{1}}),
            (Plan{{0, Shard{0}, Replicate{}}, {1, Partial{}, Shard{1}}}));
  EXPECT_EQ(redistribute_plan({Shard{0}, Shard{1}}, {Shard{0}, Shard{1}}), Plan{});
}

TEST(RedistributePlan, UndoesInnerCutsFirst) {
  EXPECT_EQ(
      redistribute_plan({Shard{0}, Shard{0}}, {Replicate{}, Shard{0}}),
      (Plan{{1, Shard{0}, Replicate{}}, {0, Shard{0}, Replicate{}}, {1, Replicate{}, Shard{0}}}));
}

TEST(RedistributePlan, ReducesBeforeItSplitsIntoTermsOfAnotherKind) {
  const Partial greatest{Partial::Op::kMax};
  EXPECT_EQ(redistribute_plan({Replicate{}, Partial{}}, {greatest, Replicate{}}),
            (Plan{{1, Partial{}, Replicate{}}, {0, Replicate{}, greatest}}));
}

}  // namespace
}  // namespace fsdp::internal
