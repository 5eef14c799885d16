#include "optim/internal/matrices.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>

namespace fsdp::internal {
namespace {

std::string text_of(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

[[noreturn]] void refuse(const std::vector<int64_t>& shape, const std::string& why) {
  throw std::invalid_argument("shape " + text_of(shape) + " " + why);
}

// Of a matrix itself, as they come after those of the batch. An owner has all of it.
bool cuts_matrices(const Placement& placement, int64_t mesh_size, size_t batch_dims) {
  const bool is_owned = placement.is_owned();
  return mesh_size > 1 && placement.is_shard() && !is_owned &&
         static_cast<size_t>(placement.shard_dim()) >= batch_dims;
}

// Whether each part of dimension 0 consists of blocks of `rows` rows, on every rank.
bool has_whole_blocks(const TensorLayout& layout, int64_t rows) {
  const auto& mesh = layout.mesh_shape();
  std::vector<int64_t> coordinate(mesh.size(), 0);
  while (true) {
    for (const auto& [box, begin] : layout.local_boxes(coordinate))
      if (box[0].offset % rows != 0 || box[0].length % rows != 0) return false;
    size_t dim = mesh.size();
    while (dim > 0 && ++coordinate[dim - 1] == mesh[dim - 1]) coordinate[--dim] = 0;
    if (dim == 0) return true;
  }
}

}  // namespace

Matrices matrices_of(const std::vector<int64_t>& shape, const MatrixOptions& options) {
  const size_t dims = shape.size();
  if (options.leading_dims_are_batch) {
    if (options.matrix_rows != 0)
      refuse(shape, "has a batch and matrix_rows, expected one of both");
    if (dims < 2) refuse(shape, "is of no matrices, expected 2 or more dimensions");
    const auto count =
        std::accumulate(shape.begin(), shape.end() - 2, int64_t{1}, std::multiplies());
    return {count, shape[dims - 2], shape[dims - 1]};
  }
  if (dims != 2)
    refuse(shape, "is no matrix, expected 2 dimensions, or more with leading_dims_are_batch");
  const int64_t rows = options.matrix_rows;
  if (rows == 0) return {1, shape[0], shape[1]};
  if (rows < 0 || shape[0] % rows != 0)
    refuse(shape, "is not divided by matrix_rows = " + std::to_string(rows));
  return {shape[0] / rows, rows, shape[1]};
}

bool are_whole_on_all_ranks(const TensorLayout& layout, const MatrixOptions& options) {
  const size_t dims = layout.shape().size();
  const size_t batch_dims =
      options.leading_dims_are_batch ? dims - 2 : (options.matrix_rows > 0 ? 1 : 0);
  for (size_t i = 0; i < layout.placements().size(); ++i)
    if (cuts_matrices(layout.placements()[i], layout.mesh_shape()[i], batch_dims)) return false;
  return options.matrix_rows == 0 || has_whole_blocks(layout, options.matrix_rows);
}

double newton_schulz_cost(const Matrices& matrices) {
  const auto shorter = static_cast<double>(std::min(matrices.rows, matrices.columns));
  const auto longer = static_cast<double>(std::max(matrices.rows, matrices.columns));
  return static_cast<double>(matrices.count) * shorter * shorter * (2 * longer + shorter);
}

}  // namespace fsdp::internal
