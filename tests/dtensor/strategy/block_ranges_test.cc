#include "dtensor/strategy/view_cuts.h"

#include <gtest/gtest.h>

namespace fsdp::internal {
namespace {

using RankElements = std::vector<int64_t>;

// What a rank has of `size` elements that are cut so, in order.
RankElements elements_of_rank(const Shard& cut, int64_t size, int64_t ranks, int64_t rank) {
  const int64_t atoms = atoms_of(cut, size);
  const Chunk own = chunk_of(atoms, ranks, rank);
  RankElements elements;
  for (int64_t block = 0; block < cut.outer; ++block) {
    for (int64_t i = 0; i < own.length * cut.unit; ++i)
      elements.push_back(block * atoms * cut.unit + own.offset * cut.unit + i);
  }
  return elements;
}

// Those of them that lie in the range, counted from its start.
RankElements within(const RankElements& elements, const Range& range) {
  RankElements found;
  for (int64_t element : elements) {
    if (element >= range.start && element < range.start + range.length)
      found.push_back(element - range.start);
  }
  return found;
}

template <class Body>
void for_each_cut(const Body& body) {
  for (int64_t size = 1; size <= 18; ++size) {
    for (int64_t outer = 1; outer <= size; ++outer) {
      for (int64_t unit = 1; outer * unit <= size; ++unit) {
        if (size % (outer * unit) == 0) body(Shard{0, outer, unit}, size);
      }
    }
  }
}

template <class Body>
void for_each_range(int64_t size, const Body& body) {
  for (int64_t start = 0; start <= size; ++start) {
    for (int64_t length = 0; start + length <= size; ++length) body(Range{start, length});
  }
}

TEST(BlockRanges, KeepWhatEachRankHas) {
  int64_t kept = 0;
  for_each_cut([&](const Shard& cut, int64_t size) {
    for_each_range(size, [&](const Range& range) {
      for (int64_t ranks = 1; ranks <= 3; ++ranks) {
        const auto part = cut_of_range(cut, size, range, ranks);
        if (!part.has_value()) continue;
        ++kept;
        for (int64_t rank = 0; rank < ranks; ++rank) {
          const auto own = elements_of_rank(cut, size, ranks, rank);
          ASSERT_EQ(elements_of_rank(*part, range.length, ranks, rank), within(own, range));
          const TensorLayout layout({{ranks}, {cut}, {size}, {1}});
          const Range local = local_range(layout, {rank}, 0, range);
          const RankElements found(own.begin() + local.start,
                                   own.begin() + local.start + local.length);
          ASSERT_EQ(found.size(), within(own, range).size());
          for (size_t i = 0; i < found.size(); ++i)
            ASSERT_EQ(found[i] - range.start, within(own, range)[i]);
        }
      }
    });
  });
  EXPECT_GT(kept, 1000);
}

TEST(BlockRanges, LieInWhatIsAroundThem) {
  int64_t found = 0;
  for_each_cut([&](const Shard& part, int64_t length) {
    for (int64_t size = length; size <= 3 * length; ++size) {
      for (int64_t start = 0; start + length <= size; ++start) {
        const Range range{start, length};
        const auto whole = cut_around_range(part, size, range, /*ranks=*/3);
        if (!whole.has_value()) continue;
        ++found;
        for (int64_t rank = 0; rank < 3; ++rank) {
          ASSERT_EQ(within(elements_of_rank(*whole, size, 3, rank), range),
                    elements_of_rank(part, length, 3, rank));
        }
      }
    }
  });
  EXPECT_GT(found, 100);
}

TEST(BlockRanges, AreOfWholeBlocks) {
  const Shard packed{.dim = 1, .outer = 3, .unit = 2};
  EXPECT_EQ(cut_of_range(packed, 24, {8, 8}, 2), (Shard{.dim = 1}));
  EXPECT_EQ(cut_of_range(packed, 24, {0, 16}, 2), (Shard{.dim = 1, .outer = 2}));
  EXPECT_EQ(cut_of_range(packed, 24, {0, 24}, 2), packed);
  EXPECT_EQ(cut_of_range(packed, 24, {4, 8}, 2), std::nullopt);
  EXPECT_EQ(cut_of_range(packed, 24, {8, 4}, 2), std::nullopt);
  EXPECT_EQ(cut_of_range({.dim = 0}, 8, {0, 4}, 2), std::nullopt);
  EXPECT_EQ(cut_of_range({.dim = 0}, 8, {3, 0}, 2), Shard{0});
}

}  // namespace
}  // namespace fsdp::internal
