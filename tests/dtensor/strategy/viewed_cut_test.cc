// Views of tensors of every shape and cut, against what each rank's elements are.
#include "dtensor/layout/shard_layout.h"
#include "dtensor/strategy/view_cuts.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

namespace fsdp::internal {
namespace {

using Sizes = std::vector<int64_t>;
using Elements = std::vector<Sizes>;  // by rank: which, in order

Sizes elements_of(const Sizes& shape, const Shard& cut, int64_t ranks, int64_t rank) {
  int64_t right = 1, count = 1;
  for (size_t d = 0; d < shape.size(); ++d) {
    count *= shape[d];
    if (static_cast<int64_t>(d) > cut.dim) right *= shape[d];
  }
  const int64_t size = shape[static_cast<size_t>(cut.dim)];
  const int64_t atoms = atoms_of(cut, size);
  const Chunk own = chunk_of(atoms, ranks, rank);
  Sizes elements;
  for (int64_t e = 0; e < count; ++e) {
    const int64_t atom = e / right % size / cut.unit % atoms;
    if (atom >= own.offset && atom < own.offset + own.length) elements.push_back(e);
  }
  return elements;
}

Elements elements_of(const Sizes& shape, const Shard& cut, int64_t ranks) {
  Elements elements;
  for (int64_t rank = 0; rank < ranks; ++rank)
    elements.push_back(elements_of(shape, cut, ranks, rank));
  return elements;
}

// Every shape of `count` elements with at most four dimensions, one of them of size 1.
void add_shapes(int64_t count, const Sizes& begun, bool has_one, std::set<Sizes>& shapes) {
  if (count == 1 && !begun.empty()) shapes.insert(begun);
  if (begun.size() == 4) return;
  for (int64_t size = has_one ? 2 : 1; size <= count; ++size) {
    if (count % size != 0) continue;
    Sizes longer = begun;
    longer.push_back(size);
    add_shapes(count / size, longer, has_one || size == 1, shapes);
  }
}

std::vector<Shard> cuts_of(const Sizes& shape) {
  std::vector<Shard> cuts;
  for (size_t d = 0; d < shape.size(); ++d) {
    for (int64_t outer = 1; outer <= shape[d]; ++outer) {
      for (int64_t unit = 1; outer * unit <= shape[d]; ++unit) {
        if (shape[d] % (outer * unit) == 0)
          cuts.push_back({.dim = static_cast<int64_t>(d), .outer = outer, .unit = unit});
      }
    }
  }
  return cuts;
}

struct Cut {
  Sizes shape;
  Shard cut;
};

// All cuts of shapes of `count` elements by which the ranks have the same.
std::map<Elements, std::vector<Cut>> cuts_by_elements(int64_t count, int64_t ranks) {
  std::set<Sizes> shapes;
  add_shapes(count, {}, false, shapes);
  std::map<Elements, std::vector<Cut>> cuts;
  for (const Sizes& shape : shapes) {
    for (const Shard& cut : cuts_of(shape))
      cuts[elements_of(shape, cut, ranks)].push_back({shape, cut});
  }
  return cuts;
}

TEST(ViewedCut, IsFoundWheneverThereIsOne) {
  for (int64_t count = 1; count <= 24; ++count) {
    for (int64_t ranks = 1; ranks <= 4; ++ranks) {
      for (const auto& [elements, alike] : cuts_by_elements(count, ranks)) {
        for (const Cut& before : alike) {
          for (const Cut& after : alike) {
            const auto viewed = viewed_cut(before.shape, after.shape, before.cut, ranks);
            ASSERT_TRUE(viewed.has_value());
            ASSERT_EQ(elements_of(after.shape, *viewed, ranks), elements);
          }
        }
      }
    }
  }
}

TEST(ViewedCut, IsNotMadeUp) {
  for (int64_t count = 1; count <= 16; ++count) {
    for (int64_t ranks = 2; ranks <= 3; ++ranks) {
      std::set<Sizes> shapes;
      add_shapes(count, {}, false, shapes);
      for (const Sizes& before : shapes) {
        for (const Shard& cut : cuts_of(before)) {
          for (const Sizes& after : shapes) {
            const auto viewed = viewed_cut(before, after, cut, ranks);
            if (!viewed) continue;
            ASSERT_EQ(elements_of(after, *viewed, ranks), elements_of(before, cut, ranks));
          }
        }
      }
    }
  }
}

TEST(ViewedCut, OfHeadsSequencesAndPackedMatrices) {
  EXPECT_EQ(viewed_cut({2, 56}, {2, 7, 8}, {.dim = 1, .unit = 8}, 2), Shard{1});
  EXPECT_EQ(viewed_cut({2, 7, 8}, {2, 56}, {.dim = 1}, 2), (Shard{.dim = 1, .unit = 8}));
  EXPECT_EQ(viewed_cut({2, 8, 16}, {16, 16}, {.dim = 1}, 2), (Shard{.dim = 0, .outer = 2}));
  EXPECT_EQ(viewed_cut({16, 16}, {2, 8, 16}, {.dim = 0, .outer = 2}, 2), Shard{1});
  EXPECT_EQ(viewed_cut({5, 2, 12}, {5, 6, 4}, {.dim = 2, .unit = 4}, 3),
            (Shard{.dim = 1, .outer = 2}));
  EXPECT_EQ(viewed_cut({4, 6}, {3, 8}, {.dim = 0}, 3), std::nullopt);
  EXPECT_EQ(viewed_cut({6}, {}, {.dim = 0}, 2), std::nullopt);
  EXPECT_EQ(viewed_cut({0, 4}, {4, 0}, {.dim = 1}, 2), Shard{0});
}

// Equal cuts are written alike, and simplest is none of another.
TEST(SimplestCut, IsTheSameForAllThatCutAlike) {
  for (int64_t size = 1; size <= 36; ++size) {
    for (int64_t ranks = 1; ranks <= 4; ++ranks) {
      std::map<Elements, Shard> simplest_of;
      for (const Shard& cut : cuts_of({size})) {
        const auto elements = elements_of({size}, cut, ranks);
        const Shard simple = simplest(cut, size, ranks);
        ASSERT_EQ(elements_of({size}, simple, ranks), elements);
        ASSERT_EQ(simplest_of.emplace(elements, simple).first->second, simple)
            << size << " " << ranks << " " << Placement(cut);
      }
    }
  }
}

}  // namespace
}  // namespace fsdp::internal
