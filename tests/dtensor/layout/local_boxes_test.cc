// Which part of a tensor each rank has, for all meshes of up to eight ranks, all sizes
// below 40, and all units: every element lies on one rank, and copies of it where a mesh
// dimension replicates.
#include "dtensor/layout/shard_layout.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/accumulate.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace fsdp::internal {
namespace {

using Sizes = std::vector<int64_t>;
using Cuts = std::vector<Placement>;

constexpr int64_t kMostRanksOfBoxes = 8;
constexpr int64_t kSizes = 40;

void for_meshes(size_t ndim, const Sizes& begun, const std::function<void(const Sizes&)>& body) {
  if (begun.size() == ndim) return body(begun);
  for (int64_t ranks = 1; ranks * c10::multiply_integers(begun) <= kMostRanksOfBoxes; ++ranks) {
    Sizes longer = begun;
    longer.push_back(ranks);
    for_meshes(ndim, longer, body);
  }
}
void for_meshes(size_t ndim, const std::function<void(const Sizes&)>& body) {
  for_meshes(ndim, {}, body);
}

// Every index below `shape`, row-major.
void for_indices(const Sizes& shape, const std::function<void(const Sizes&)>& body) {
  const int64_t count = c10::multiply_integers(shape);
  for (int64_t i = 0; i < count; ++i) {
    Sizes index(shape.size());
    int64_t left = i;
    for (size_t d = shape.size(); d-- > 0; left /= shape[d]) index[d] = left % shape[d];
    body(index);
  }
}

std::string text_of(const Sizes& shape, const Sizes& mesh, const Cuts& cuts) {
  std::ostringstream out;
  out << c10::IntArrayRef(shape) << " on a mesh " << c10::IntArrayRef(mesh) << ":";
  for (const Placement& cut : cuts) out << " " << cut;
  return out.str();
}

// Which coordinate along the mesh dimensions that cut `dim`, row-major, has an element of
// that dimension, which has `size`: one after another they deal out what the one before
// left, in equal runs of atoms.
int64_t owner_of(int64_t element, int64_t size, int64_t dim, const Sizes& mesh, const Cuts& cuts) {
  int64_t owner = 0;
  for (size_t m = 0; m < cuts.size(); ++m) {
    if (!cuts[m].is_shard(dim)) continue;
    const int64_t unit = cuts[m].shard().unit;
    const int64_t run = (size / unit + mesh[m] - 1) / mesh[m] * unit;
    owner = owner * mesh[m] + element / run;
    size = std::min(run, size - element / run * run);
    element %= run;
  }
  return owner;
}

// The same of `coordinate`.
int64_t along(int64_t dim, const Sizes& coordinate, const Sizes& mesh, const Cuts& cuts) {
  int64_t index = 0;
  for (size_t m = 0; m < cuts.size(); ++m) {
    if (cuts[m].is_shard(dim)) index = index * mesh[m] + coordinate[m];
  }
  return index;
}

// The box has the elements that are its coordinate's, and no others.
bool is_right(const std::vector<Chunk>& box, const Sizes& shape, const Sizes& mesh,
              const Cuts& cuts, const Sizes& coordinate) {
  for (size_t d = 0; d < shape.size(); ++d) {
    const auto dim = static_cast<int64_t>(d);
    const int64_t own = along(dim, coordinate, mesh, cuts);
    for (int64_t e = 0; e < shape[d]; ++e) {
      const bool is_inside = e >= box[d].offset && e < box[d].offset + box[d].length;
      if (is_inside != (owner_of(e, shape[d], dim, mesh, cuts) == own)) return false;
    }
  }
  return true;
}

// Each copy, by its coordinate along the mesh dimensions that replicate, has every
// element once.
void expect_tiles(const Sizes& shape, const Sizes& mesh, const Cuts& cuts) {
  std::map<Sizes, int64_t> held;  // elements
  bool all_right = true;
  for_indices(mesh, [&](const Sizes& coordinate) {
    const auto boxes = local_boxes(shape, mesh, cuts, coordinate);
    ASSERT_EQ(boxes.size(), 1) << text_of(shape, mesh, cuts);
    const auto& box = boxes[0].box;
    const Sizes local = local_shape(shape, mesh, cuts, coordinate);
    for (size_t d = 0; d < shape.size(); ++d) all_right &= box[d].length == local[d];
    all_right &= is_right(box, shape, mesh, cuts, coordinate);
    Sizes copy;
    for (size_t m = 0; m < cuts.size(); ++m) {
      if (!cuts[m].is_shard()) copy.push_back(coordinate[m]);
    }
    held[copy] += c10::multiply_integers(local);
  });
  EXPECT_TRUE(all_right) << text_of(shape, mesh, cuts);
  for (const auto& [copy, elements] : held)
    EXPECT_EQ(elements, c10::multiply_integers(shape)) << text_of(shape, mesh, cuts);
}

// All of a dimension of `size` elements, and 1.
Sizes units_of(int64_t size) {
  Sizes units{1};
  for (int64_t unit = 2; unit <= size; ++unit) {
    if (size % unit == 0) units.push_back(unit);
  }
  return units;
}

void for_sizes_and_units(const std::function<void(int64_t size, int64_t unit)>& body) {
  for (int64_t size = 0; size < kSizes; ++size) {
    for (const int64_t unit : units_of(size)) body(size, unit);
  }
}

TEST(Boxes, OfOneCutTileADimension) {
  for_meshes(1, [](const Sizes& mesh) {
    for_sizes_and_units([&](int64_t size, int64_t unit) {
      expect_tiles({size}, mesh, {Shard{.dim = 0, .unit = unit}});
    });
  });
}

TEST(Boxes, OfTwoCutsOfOneDimensionTileIt) {
  for_meshes(2, [](const Sizes& mesh) {
    for_sizes_and_units([&](int64_t size, int64_t unit) {
      expect_tiles({size}, mesh, {Shard{.dim = 0, .unit = unit}, Shard{0}});
    });
  });
}

TEST(Boxes, BesideCopiesTileEachCopy) {
  for_meshes(2, [](const Sizes& mesh) {
    for_sizes_and_units([&](int64_t size, int64_t unit) {
      const Shard cut{.dim = 0, .unit = unit};
      expect_tiles({size}, mesh, {cut, Replicate{}});
      expect_tiles({size}, mesh, {Replicate{}, cut});
      expect_tiles({size}, mesh, {Replicate{}, Replicate{}});
    });
  });
}

// Tensor-parallel, then replicas of shards.
TEST(Boxes, OfThreeMeshDimensionsTileADimension) {
  for_meshes(3, [](const Sizes& mesh) {
    for_sizes_and_units([&](int64_t size, int64_t unit) {
      expect_tiles({size}, mesh, {Shard{.dim = 0, .unit = unit}, Replicate{}, Shard{0}});
      expect_tiles({size}, mesh, {Shard{.dim = 0, .unit = unit}, Shard{0}, Shard{0}});
    });
  });
}

TEST(Boxes, OfCutsOfTwoDimensionsTileAMatrix) {
  for_meshes(2, [](const Sizes& mesh) {
    for (int64_t rows = 0; rows < kSizes; ++rows) {
      for (int64_t columns = 0; columns < kSizes; ++columns) {
        expect_tiles({rows, columns}, mesh, {Shard{0}, Shard{1}});
        expect_tiles({rows, columns}, mesh, {Shard{1}, Shard{0}});
      }
    }
  });
}

TEST(Boxes, OfAtomsInBothDimensionsTileAMatrix) {
  for_meshes(2, [](const Sizes& mesh) {
    for_sizes_and_units([&](int64_t rows, int64_t unit) {
      for (const int64_t columns : {0, 1, 7, 12}) {
        for (const int64_t other : units_of(columns)) {
          expect_tiles({rows, columns}, mesh,
                       {Shard{.dim = 1, .unit = other}, Shard{.dim = 0, .unit = unit}});
        }
      }
    });
  });
}

}  // namespace
}  // namespace fsdp::internal
