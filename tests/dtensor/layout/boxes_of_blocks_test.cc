// The boxes of cuts in blocks, on all meshes of up to eight ranks, one and two
// dimensional, with a plain cut inside or beside them.
#include "dtensor/layout/shard_layout.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <functional>

namespace fsdp::internal {
namespace {

using ScalarHash = std::vector<int64_t>;

constexpr int64_t kMostRanks = 8, kLargest = 24;

at::Tensor box_of(const at::Tensor& tensor, const ScalarHash& begin,
                  const std::vector<Chunk>& box) {
  at::Tensor part = tensor;
  for (size_t dim = 0; dim < box.size(); ++dim)
    part = part.narrow(static_cast<int64_t>(dim), begin[dim], box[dim].length);
  return part;
}

ScalarHash begin_of(const std::vector<Chunk>& box) {
  ScalarHash begin;
  for (const Chunk& chunk : box) begin.push_back(chunk.offset);
  return begin;
}

// This rank's boxes are what its part has, all of it, where they say.
void expect_boxes_of_part(const TensorLayout& layout, const at::Tensor& whole,
                          const DTensorSpec& spec) {
  const at::Tensor part = local_part(whole, spec);
  int64_t elements = 0;
  for (const LocalBox& own : spec.local_boxes()) {
    const at::Tensor wanted = box_of(whole, begin_of(own.box), own.box);
    ASSERT_TRUE(box_of(part, own.begin, own.box).equal(wanted)) << to_string(layout);
    elements += wanted.numel();
  }
  ASSERT_EQ(elements, part.numel()) << to_string(layout);
}

// All ranks together have each element once for each copy.
void expect_boxes_tile(const TensorLayout& layout, int64_t copies) {
  at::Tensor seen = at::zeros(layout.shape(), at::kInt);
  const auto& mesh = layout.mesh_shape();
  const int64_t inner = mesh.size() > 1 ? mesh[1] : 1;
  for (int64_t rank = 0; rank < mesh[0] * inner; ++rank) {
    const ScalarHash coordinate =
        mesh.size() > 1 ? ScalarHash{rank / inner, rank % inner} : ScalarHash{rank};
    for (const LocalBox& own : layout.local_boxes(coordinate))
      box_of(seen, begin_of(own.box), own.box).add_(1);
  }
  ASSERT_TRUE(seen.eq(copies).all().item<bool>()) << to_string(layout);
}

void expect_exact(const DeviceMesh& mesh, const std::vector<Placement>& placements,
                  const ScalarHash& shape) {
  const DTensorSpec spec(mesh, placements, shape);
  int64_t copies = 1, numel = 1;
  for (size_t m = 0; m < placements.size(); ++m)
    if (!placements[m].is_shard()) copies *= mesh.shape()[m];
  for (const int64_t size : shape) numel *= size;
  expect_boxes_of_part(spec.layout(), at::arange(numel).view(shape), spec);
  if (mesh.rank() == 0) expect_boxes_tile(spec.layout(), copies);
}

// Every cut in blocks of a dimension of up to `largest` elements.
void for_each_cut(int64_t largest, const std::function<void(int64_t, const Shard&)>& visit) {
  for (int64_t outer = 2; outer <= largest; ++outer) {
    for (int64_t unit = 1; outer * unit <= largest; ++unit) {
      for (int64_t size = 0; size <= largest; size += outer * unit)
        visit(size, {.dim = 0, .outer = outer, .unit = unit});
    }
  }
}

// On every rank of every mesh of two dimensions, or of one.
void on_meshes(bool flat, const std::function<void(const DeviceMesh&)>& body) {
  for (int64_t first = 1; first <= kMostRanks; ++first) {
    for (int64_t second = 1; first * second <= kMostRanks; ++second) {
      if (flat && second > 1) break;
      testing::run_ranks(first * second, [&](int64_t) {
        body(init_device_mesh(c10::kCPU, flat ? ScalarHash{first} : ScalarHash{first, second}));
      });
    }
  }
}

TEST(BlockBoxes, OfOneCutAreThoseOfThePart) {
  on_meshes(/*flat=*/true, [](const DeviceMesh& mesh) {
    for_each_cut(kLargest,
                 [&](int64_t size, const Shard& cut) { expect_exact(mesh, {cut}, {size}); });
  });
}

TEST(BlockBoxes, OfAPlainCutWithinCrossBordersOfBlocks) {
  on_meshes(/*flat=*/false, [](const DeviceMesh& mesh) {
    for_each_cut(kLargest, [&](int64_t size, const Shard& cut) {
      expect_exact(mesh, {cut, Shard{0}}, {size});
    });
  });
}

TEST(BlockBoxes, OfCopiesAndOfTwoDimensionsAreThoseOfThePart) {
  on_meshes(/*flat=*/false, [](const DeviceMesh& mesh) {
    for_each_cut(12, [&](int64_t size, const Shard& cut) {
      const Shard columns{.dim = 1, .outer = cut.outer, .unit = cut.unit};
      expect_exact(mesh, {cut, Replicate{}}, {size});
      expect_exact(mesh, {Replicate{}, cut}, {size});
      expect_exact(mesh, {cut, Shard{1}}, {size, 3});
      expect_exact(mesh, {Shard{0}, columns}, {3, size});
      expect_exact(mesh, {columns, Shard{.dim = 0, .outer = 2}}, {6, size});
    });
  });
}

TEST(BlockBoxes, AreOneWhereTheyTouch) {
  const Shard packed{.dim = 0, .outer = 3};
  EXPECT_EQ(local_boxes({12}, {1}, {packed}, {0}), (std::vector<LocalBox>{{{{0, 12}}, {0}}}));
  EXPECT_EQ(
      local_boxes({12, 2}, {2}, {packed}, {1}),
      (std::vector<LocalBox>{
          {{{2, 2}, {0, 2}}, {0, 0}}, {{{6, 2}, {0, 2}}, {2, 0}}, {{{10, 2}, {0, 2}}, {4, 0}}}));
  // Of 6 rows each of two has 3: a block and half of the next one.
  EXPECT_EQ(local_boxes({12}, {2, 2}, {packed, Shard{0}}, {0, 1}),
            (std::vector<LocalBox>{{{{5, 1}}, {0}}, {{{8, 2}}, {1}}}));
  EXPECT_EQ(local_boxes({3}, {2}, {packed}, {1}), (std::vector<LocalBox>{{{{3, 0}}, {0}}}));
}

}  // namespace
}  // namespace fsdp::internal
