#include "optim/internal/matrices.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace fsdp::internal {
namespace {

std::string refusal(const std::vector<int64_t>& shape, const MatrixOptions& options) {
  try {
    matrices_of(shape, options);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(MatricesOf, ATensorIsOneAllRowsOfHeadsOrAStack) {
  EXPECT_EQ(matrices_of({6, 4}, {}), (Matrices{1, 6, 4}));
  EXPECT_EQ(matrices_of({6, 4}, {.matrix_rows = 2}), (Matrices{3, 2, 4}));
  EXPECT_EQ(matrices_of({5, 6, 4}, {.leading_dims_are_batch = true}), (Matrices{5, 6, 4}));
  EXPECT_EQ(matrices_of({2, 5, 6, 4}, {.leading_dims_are_batch = true}), (Matrices{10, 6, 4}));
  EXPECT_EQ(matrices_of({6, 4}, {.leading_dims_are_batch = true}), (Matrices{1, 6, 4}));
}

TEST(MatricesOf, SaysWhatIsNone) {
  EXPECT_EQ(refusal({6}, {}),
            "shape [6] is no matrix, expected 2 dimensions, or more with leading_dims_are_batch");
  EXPECT_EQ(refusal({5, 6, 4}, {}),
            "shape [5, 6, 4] is no matrix, expected 2 dimensions, or more with "
            "leading_dims_are_batch");
  EXPECT_EQ(refusal({6, 4}, {.matrix_rows = 4}), "shape [6, 4] is not divided by matrix_rows = 4");
  EXPECT_EQ(refusal({6, 4}, {.matrix_rows = -2}),
            "shape [6, 4] is not divided by matrix_rows = -2");
  EXPECT_EQ(refusal({6}, {.leading_dims_are_batch = true}),
            "shape [6] is of no matrices, expected 2 or more dimensions");
  EXPECT_NE(refusal({6, 4}, {.matrix_rows = 2, .leading_dims_are_batch = true}), "");
}

TensorLayout layout_of(std::vector<int64_t> shape, std::vector<int64_t> mesh,
                       std::vector<Placement> placements) {
  std::vector<int64_t> stride(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) stride[i - 1] = stride[i] * shape[i];
  return TensorLayout({.mesh_shape = std::move(mesh),
                       .placements = std::move(placements),
                       .shape = std::move(shape),
                       .stride = std::move(stride)});
}

TEST(AreWholeOnAllRanks, WhereNoCutGoesThroughOne) {
  EXPECT_TRUE(are_whole_on_all_ranks(layout_of({6, 4}, {2}, {Replicate{}}), {}));
  EXPECT_TRUE(are_whole_on_all_ranks(layout_of({6, 4}, {1}, {Shard{0}}), {}));
  EXPECT_FALSE(are_whole_on_all_ranks(layout_of({6, 4}, {2}, {Shard{0}}), {}));
  EXPECT_FALSE(are_whole_on_all_ranks(layout_of({6, 4}, {2}, {Shard{1}}), {}));
}

TEST(AreWholeOnAllRanks, HeadsThatTheShardsAlignWith) {
  const MatrixOptions heads{.matrix_rows = 2};
  EXPECT_TRUE(are_whole_on_all_ranks(layout_of({8, 4}, {2}, {Shard{0}}), heads));
  EXPECT_FALSE(are_whole_on_all_ranks(layout_of({6, 4}, {2}, {Shard{0}}), heads));
  EXPECT_TRUE(are_whole_on_all_ranks(layout_of({6, 4}, {2}, {Shard{.dim = 0, .unit = 2}}), heads));
  EXPECT_FALSE(are_whole_on_all_ranks(layout_of({8, 4}, {2}, {Shard{1}}), heads));
  EXPECT_FALSE(are_whole_on_all_ranks(layout_of({8, 4}, {2, 4}, {Shard{0}, Shard{0}}), heads));
  EXPECT_TRUE(are_whole_on_all_ranks(layout_of({8, 4}, {2, 2}, {Shard{0}, Shard{0}}), heads));
}

TEST(AreWholeOnAllRanks, ExpertsThatAreCutBetweenExperts) {
  const MatrixOptions experts{.leading_dims_are_batch = true};
  EXPECT_TRUE(are_whole_on_all_ranks(layout_of({5, 6, 4}, {2}, {Shard{0}}), experts));
  EXPECT_FALSE(are_whole_on_all_ranks(layout_of({5, 6, 4}, {2}, {Shard{1}}), experts));
  EXPECT_FALSE(are_whole_on_all_ranks(layout_of({5, 6, 4}, {2, 2}, {Shard{0}, Shard{2}}), experts));
}

}  // namespace
}  // namespace fsdp::internal
