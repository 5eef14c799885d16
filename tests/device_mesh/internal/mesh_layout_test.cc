#include "device_mesh/internal/mesh_layout.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>

namespace fsdp::internal {
namespace {

using Indices = MeshLayout::Indices;

// Every shape of up to four dimensions of sizes 1 to 3.
std::vector<Indices> all_shapes() {
  std::vector<Indices> shapes{{}};
  for (size_t begin = 0, ndim = 0; ndim < 4; ++ndim) {
    const size_t end = shapes.size();
    for (size_t i = begin; i < end; ++i) {
      for (int64_t size = 1; size <= 3; ++size) {
        Indices longer = shapes[i];
        longer.push_back(size);
        shapes.push_back(longer);
      }
    }
    begin = end;
  }
  return shapes;
}

// Row-major position, written down independently of the layout.
int64_t horner(const Indices& sizes, const Indices& coordinate) {
  int64_t position = 0;
  for (size_t d = 0; d < sizes.size(); ++d) position = position * sizes[d] + coordinate[d];
  return position;
}

TEST(MeshLayout, RowMajorRoundTripsEveryPosition) {
  for (const Indices& sizes : all_shapes()) {
    const MeshLayout layout = MeshLayout::row_major(sizes);
    Indices iota(static_cast<size_t>(layout.size()));
    std::iota(iota.begin(), iota.end(), int64_t{0});
    ASSERT_EQ(layout.positions(), iota);
    for (int64_t position : iota) {
      const Indices coordinate = *layout.coordinate_of(position);
      ASSERT_EQ(horner(sizes, coordinate), position);
      ASSERT_EQ(layout.position_of(coordinate), position);
    }
    EXPECT_FALSE(layout.coordinate_of(layout.size()).has_value());
    EXPECT_FALSE(layout.coordinate_of(-1).has_value());
  }
}

TEST(MeshLayout, SliceHoldsExactlyThePositionsThatShareTheOtherCoordinates) {
  for (const Indices& sizes : all_shapes()) {
    const MeshLayout layout = MeshLayout::row_major(sizes);
    for (int64_t d = 0; d < layout.ndim(); ++d) {
      for (int64_t position : layout.positions()) {
        const Indices coordinate = *layout.coordinate_of(position);
        const MeshLayout slice = layout.along({d}, coordinate);
        Indices expected;
        for (int64_t index = 0; index < sizes[static_cast<size_t>(d)]; ++index) {
          Indices other = coordinate;
          other[static_cast<size_t>(d)] = index;
          expected.push_back(horner(sizes, other));
        }
        ASSERT_EQ(slice.positions(), expected);
      }
    }
  }
}

// Of all slices along the same dimensions, found one by one.
void expect_counted(const MeshLayout& layout, const Indices& dims) {
  std::map<int64_t, MeshLayout> slices;  // by first position
  for (int64_t position : layout.positions()) {
    const auto slice = layout.along(dims, *layout.coordinate_of(position));
    slices.emplace(slice.positions().front(), slice);
  }
  int64_t index = 0;
  for (const auto& [first, slice] : slices) ASSERT_EQ(slice.slice_index(), index++);
}

TEST(MeshLayout, SlicesAreCountedInTheOrderOfTheirFirstPositions) {
  for (const Indices& sizes : all_shapes()) {
    const MeshLayout layout = MeshLayout::row_major(sizes);
    EXPECT_EQ(layout.slice_index(), 0);
    for (int64_t a = 0; a < layout.ndim(); ++a) {
      expect_counted(layout, {a});
      for (int64_t b = 0; b < layout.ndim(); ++b) {
        if (a == b) continue;
        expect_counted(layout, {a, b});
        const MeshLayout merged = layout.merged({a, b});
        for (int64_t d = 0; d < merged.ndim(); ++d) expect_counted(merged, {d});
      }
      for (int64_t n = 1; n <= sizes[static_cast<size_t>(a)]; ++n) {
        if (const auto split = layout.split(a, n)) expect_counted(*split, {a + 1});
      }
    }
  }
}

TEST(MeshLayout, MergedDimensionIsRowMajorInTheGivenOrder) {
  for (const Indices& sizes : all_shapes()) {
    const MeshLayout layout = MeshLayout::row_major(sizes);
    for (int64_t a = 0; a < layout.ndim(); ++a) {
      for (int64_t b = 0; b < layout.ndim(); ++b) {
        if (a == b) continue;
        const MeshLayout merged = layout.merged({a, b});
        const auto at = static_cast<size_t>(layout.merged_position({a, b}));
        ASSERT_EQ(merged.ndim(), layout.ndim() - 1);
        for (int64_t position : layout.positions()) {
          const Indices before = *layout.coordinate_of(position);
          const Indices after = *merged.coordinate_of(position);
          const auto size_b = sizes[static_cast<size_t>(b)];
          ASSERT_EQ(after[at],
                    before[static_cast<size_t>(a)] * size_b + before[static_cast<size_t>(b)]);
          ASSERT_EQ(merged.position_of(after), position);
        }
      }
    }
  }
}

TEST(MeshLayout, SplitDimensionWalksBlocksOfNeighbours) {
  for (const Indices& sizes : all_shapes()) {
    const MeshLayout layout = MeshLayout::row_major(sizes);
    for (int64_t d = 0; d < layout.ndim(); ++d) {
      const auto at = static_cast<size_t>(d);
      for (int64_t n = 1; n <= sizes[at] + 1; ++n) {
        const auto split = layout.split(d, n);
        ASSERT_EQ(split.has_value(), sizes[at] % n == 0) << n;
        if (!split) continue;
        for (int64_t position : layout.positions()) {
          const Indices before = *layout.coordinate_of(position);
          const Indices after = *split->coordinate_of(position);
          ASSERT_EQ(after[at], before[at] / n);
          ASSERT_EQ(after[at + 1], before[at] % n);
          ASSERT_EQ(split->position_of(after), position);
        }
      }
    }
  }
}

TEST(MeshLayout, SplitsAMergedDimensionAlongItsSteps) {
  const MeshLayout merged = MeshLayout::row_major({4, 2, 3}).merged({0, 2});  // 4 steps of 3
  EXPECT_EQ(merged.split(0, 3)->along({1}, {2, 0, 0}).positions(), (Indices{12, 13, 14}));
  EXPECT_EQ(merged.split(0, 6)->along({1}, {1, 0, 1}).positions(),
            (Indices{15, 16, 17, 21, 22, 23}));
  EXPECT_FALSE(merged.split(0, 2));  // blocks would begin inside a step
}

TEST(MeshLayout, SliceInReversedOrderTransposes) {
  const MeshLayout layout = MeshLayout::row_major({2, 3});
  EXPECT_EQ(layout.along({1, 0}, {0, 0}).positions(), (Indices{0, 3, 1, 4, 2, 5}));
}

TEST(MeshLayout, TwoSlicesBesideEachOtherAreTheSliceOfBoth) {
  const MeshLayout grid = MeshLayout::row_major({2, 3, 4});
  for (int64_t position = 0; position < grid.size(); ++position) {
    const auto here = *grid.coordinate_of(position);
    const auto outer = grid.along({2}, here), inner = grid.along({0, 1}, here);
    const auto both = outer.beside(inner, *inner.coordinate_of(position));
    ASSERT_TRUE(both.has_value());
    EXPECT_EQ(both->positions(), grid.along({2, 0, 1}, here).positions());
    const auto one = grid.along({1}, here);
    EXPECT_FALSE(one.beside(inner, *inner.coordinate_of(position)).has_value());
    EXPECT_FALSE(one.beside(one, *one.coordinate_of(position)).has_value());
  }
}

TEST(MeshLayout, PrintsStrides) {
  const MeshLayout layout = MeshLayout::row_major({2, 3, 4});
  EXPECT_EQ(layout.strides_text(), "(12, 4, 1)");
  EXPECT_EQ(layout.along({1}, {0, 0, 0}).strides_text(), "(4,)");
  EXPECT_EQ(layout.merged({0, 1}).strides_text(), "(4, 1)");
  EXPECT_EQ(layout.merged({0, 2}).strides_text(), "((12, 1), 4)");
}

}  // namespace
}  // namespace fsdp::internal
