// Parts of stated sizes, against lists of elements.
#include "dtensor/layout/shard_layout.h"
#include "dtensor/layout/tensor_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace fsdp::internal {
namespace {

using ::testing::HasSubstr;
using Units = std::vector<int64_t>;

// Every list of `ranks` numbers up to `most`, but that of zeros.
void for_each_list(size_t ranks, int64_t most, const std::function<void(const Units&)>& visit) {
  Units units(ranks, 0);
  while (true) {
    size_t i = 0;
    while (i < ranks && ++units[i] > most) units[i++] = 0;
    if (i == ranks) return;
    visit(units);
  }
}

int64_t sum_of(const Units& units) {
  int64_t sum = 0;
  for (const int64_t each : units) sum += each;
  return sum;
}

TEST(RaggedShards, GiveEachCoordinateItsUnitsInARow) {
  for (size_t ranks = 1; ranks <= 4; ++ranks) {
    for_each_list(ranks, 3, [&](const Units& units) {
      for (const int64_t unit : {1, 2, 5}) {
        const int64_t size = sum_of(units) * unit;
        const Placement cut = RaggedShard{.dim = 0, .local_units = units};
        const TensorLayout layout({.mesh_shape = {static_cast<int64_t>(ranks)},
                                   .placements = {cut},
                                   .shape = {size, 2},
                                   .stride = {2, 1}});
        int64_t next = 0, most = 0;
        for (size_t i = 0; i < ranks; ++i) {
          const int64_t length = units[i] * unit;
          const auto boxes = layout.local_boxes({static_cast<int64_t>(i)});
          ASSERT_EQ(boxes.size(), 1U);
          EXPECT_EQ(boxes[0].box[0].length, length);
          if (length > 0) {
            EXPECT_EQ(boxes[0].box[0].offset, next);
          }
          EXPECT_EQ(layout.local_shape({static_cast<int64_t>(i)}), (Units{length, 2}));
          next += length;
          most = std::max(most, length);
        }
        EXPECT_EQ(next, size);
        EXPECT_EQ(largest_part(cut.shard(), size, static_cast<int64_t>(ranks)), most);
      }
    });
  }
}

// Inside a ragged cut a plain one cuts what is there.
TEST(RaggedShards, HoldAPlainCut) {
  const std::vector<Placement> cuts = {RaggedShard{.dim = 0, .local_units = {3, 0, 2}}, Shard{0}};
  std::vector<int> seen(10, 0);
  for (int64_t outer = 0; outer < 3; ++outer) {
    for (int64_t inner = 0; inner < 2; ++inner) {
      const auto box = local_boxes({10}, {3, 2}, cuts, {outer, inner})[0].box[0];
      for (int64_t i = 0; i < box.length; ++i) ++seen[static_cast<size_t>(box.offset + i)];
    }
  }
  EXPECT_EQ(seen, std::vector<int>(10, 1));
}

TEST(RaggedShards, AreEqualWhereTheirPartsAre) {
  const auto ragged = [](const Units& units) {
    return Placement(RaggedShard{.dim = 0, .local_units = units});
  };
  EXPECT_EQ(ragged({2, 0, 4}), ragged({1, 0, 2}));
  EXPECT_NE(ragged({2, 0, 4}), ragged({2, 4, 0}));
  EXPECT_EQ(ragged({2, 0, 4}).hash(), ragged({1, 0, 2}).hash());
  EXPECT_NE(ragged({0, 1}), Placement(Shard{0}));
  EXPECT_EQ(ragged({0, 3}), Placement(Owned{1}));
  EXPECT_EQ(ragged({2, 0, 4}).along(3).shard().local_units, ragged({1, 0, 2}).shard().local_units);
}

// As torch.chunk, where each has the same.
TEST(RaggedShards, AreWrittenSimplest) {
  const auto simple = [](const Units& units, int64_t size) {
    const Placement cut = RaggedShard{.dim = 0, .local_units = units};
    return Placement(simplest(cut.shard(), size, static_cast<int64_t>(units.size())));
  };
  EXPECT_EQ(simple({2, 2}, 8), Placement(Shard{0}));
  EXPECT_EQ(simple({3, 3, 1}, 7), Placement(Shard{0}));
  EXPECT_EQ(simple({1, 0}, 1), Placement(Shard{0}));
  EXPECT_EQ(simple({3, 1}, 8), Placement(RaggedShard{.dim = 0, .local_units = {3, 1}}));
  EXPECT_EQ(simple({1, 0}, 4), Placement(Owned{0}));
}

TEST(RaggedShards, ArePrinted) {
  EXPECT_EQ(to_string(Placement(RaggedShard{.dim = 1, .local_units = {6, 0, 2}})),
            "RaggedShard(1, local_units=[3, 0, 1])");
  EXPECT_EQ(to_string(Placement(Owned{2})), "Owned(2)");
  EXPECT_EQ(to_string(Placement(Owned{2}).along(1)), "Owned(2, dim=1)");
  EXPECT_EQ(to_string(Placement(Owned{})), "Owned()");
  EXPECT_EQ(to_string(Placement(RaggedShard{.dim = 0, .local_units = {0, 2, 0}})),
            "RaggedShard(0, local_units=[0, 1, 0])");
}

std::string why_refused(const std::vector<Placement>& placements, int64_t size) {
  try {
    TensorLayout({.mesh_shape = Units(placements.size(), 2),
                  .placements = placements,
                  .shape = {size},
                  .stride = {1}});
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "taken";
}

TEST(RaggedShards, ThatDoNotFitAreRefused) {
  const auto ragged = [](const Units& units) {
    return Placement(RaggedShard{.dim = 0, .local_units = units});
  };
  EXPECT_EQ(why_refused({ragged({3, 1})}, 8), "taken");
  EXPECT_EQ(why_refused({Owned{0}}, 7), "taken") << "an owner's list may be shorter";
  EXPECT_THAT(why_refused({ragged({3, 1})}, 6),
              HasSubstr("RaggedShard(0, local_units=[3, 1]): the sum of local_units must divide "
                        "dimension 0 of 6 elements"));
  for (const Units& units : std::vector<Units>{{1, 1, 1}, {}, {2, -1}, {0, 0}, {2, 3, 0}})
    EXPECT_THAT(why_refused({ragged(units)}, 30), HasSubstr("expected local_units of 0 or more"));
  EXPECT_THAT(why_refused({Owned{2}}, 8), HasSubstr("of a mesh dimension of 2, or an owner"));
  EXPECT_THAT(why_refused({Owned{}}, 8), HasSubstr("Owned(): expected local_units of 0 or more"));
  EXPECT_THAT(why_refused({Shard{.unit = 2, .local_units = LocalUnits({1, 1})}}, 8),
              HasSubstr("neither outer nor unit"));
  EXPECT_THAT(why_refused({Shard{0}, ragged({3, 1})}, 8),
              HasSubstr("lies inside another cut of dimension 0"));
}

}  // namespace
}  // namespace fsdp::internal
